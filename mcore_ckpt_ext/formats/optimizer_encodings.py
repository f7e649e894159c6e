"""Which optimizer format a torch_dist checkpoint has, and the codec that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.bucket_formats import BUCKET_SPACE, DP_RESHARDABLE, bucket_state, optimizer_children
from mcore_ckpt_ext.formats.dcp_index import DcpIndex
from mcore_ckpt_ext.formats.dp_zero import NAME as DP_ZERO
from mcore_ckpt_ext.formats.dp_zero import dp_zero_state
from mcore_ckpt_ext.formats.flat_buffers import FlatBuffers, FlatState
from mcore_ckpt_ext.formats.model_space_state import FULLY_RESHARDABLE, MODEL_SPACE, ModelSpaceState
from mcore_ckpt_ext.formats.shifted_state import repaired
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.layout.proposals import Proposal
from mcore_ckpt_ext.planning.plan import Source
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.transfer import Transfer

# The packing rules of the versions that wrote each flat format; dp_zero was written by all.
_RULES: Mapping[str, Sequence[PackingRule]] = {
    DP_RESHARDABLE: (PackingRule.SINCE_0_13,),
    BUCKET_SPACE: (PackingRule.UNTIL_0_7, PackingRule.UNTIL_0_8, PackingRule.UNTIL_0_12),
    DP_ZERO: (PackingRule.SINCE_0_13, PackingRule.UNTIL_0_12, PackingRule.UNTIL_0_8, PackingRule.UNTIL_0_7),
}
FORMATS = (*_RULES, FULLY_RESHARDABLE, MODEL_SPACE)


def stock_can_load(name: str | None, placement_changed: bool, version: tuple[int, int]) -> bool:
    """Whether Megatron itself loads an intact optimizer state correctly.

    Sources: `load_checkpoint` (megatron/training/checkpointing.py) and `DistributedOptimizer.load_state_dict` at each
    version. `fully_sharded_model_space` is refused since 0.16 (commit 5ab481cb); up to 0.13 its parameter groups are
    taken by position, which exchanges weight decay between them on later pipeline stages.
    `fully_sharded_bucket_space` left the loader in 0.13.

    Args:
        name: the sharding type that the checkpoint was written with.
        placement_changed: the gradient buffers of the run differ from those of the job that wrote it.
        version: of the running megatron-core, (major, minor).
    """
    if name == FULLY_RESHARDABLE:
        return version >= (0, 15)
    if name == MODEL_SPACE:
        return (0, 14) <= version < (0, 16)
    if name == BUCKET_SPACE:
        return version < (0, 13) and not placement_changed
    if name == DP_RESHARDABLE:
        return version >= (0, 15) and not placement_changed
    return name != DP_ZERO or not placement_changed


class OptimizerState(Source, Protocol):
    """The optimizer state of a checkpoint, in model space."""

    kinds: tuple[str, ...]

    def names(self) -> list[str]:
        """All parameters with optimizer state."""

    def witnesses(self) -> list[str]:
        """Where the layouts that were needed so far are known from."""

    def lost_elements(self) -> dict[str, int]:
        """Parameters of which the checkpoint lacks elements, and of how many, for each kind."""


class OpenCheckpoint(Protocol):
    """What a codec needs of the checkpoint that it belongs to."""

    folder: Path
    reader: FolderReader
    transfer: Transfer
    weights: Any

    @property
    def index(self) -> DcpIndex: ...  # noqa: D102 - see the class that has them

    @property
    def models(self) -> LocalModels: ...  # noqa: D102

    @property
    def optimizer_format(self) -> str | None: ...  # noqa: D102

    def object(self, key: str) -> Any: ...  # noqa: D102

    def orders(self) -> list[ParameterOrder]: ...  # noqa: D102

    def proposals(self, rules: Sequence[PackingRule]) -> list[Proposal]: ...  # noqa: D102


def open_optimizer(checkpoint: OpenCheckpoint) -> OptimizerState:
    """The optimizer state of a checkpoint.

    Raises:
        UnsupportedCheckpointError: there is none, or in a format that is not read.
    """
    name = checkpoint.optimizer_format
    if name == MODEL_SPACE:
        return ModelSpaceState(checkpoint.index)
    if name == FULLY_RESHARDABLE:
        written = ModelSpaceState(checkpoint.index)
        orders = checkpoint.orders()
        return repaired(written, checkpoint.models, orders, checkpoint.weights, checkpoint.transfer)
    if name is None or name not in _RULES:
        raise UnsupportedCheckpointError(
            "the optimizer state is in a format that this version does not read",
            found=name,
            expected=", ".join(FORMATS),
            where=str(checkpoint.folder),
        )
    rules = _RULES[name]
    return FlatBuffers(
        _flat_state(name, checkpoint),
        checkpoint.models,
        lambda: checkpoint.proposals(rules),
        checkpoint.weights,
        checkpoint.transfer,
    )


def has_experts_apart(index: DcpIndex, arguments: Mapping[str, Any]) -> bool:
    """Whether experts have an optimizer of their own: one chained optimizer more than the dense chunks need."""
    children = optimizer_children([*index.arrays, *index.objects])
    return children > 1 + bool(arguments.get("overlap_param_gather_with_optimizer_step"))


def _flat_state(name: str, checkpoint: OpenCheckpoint) -> FlatState:
    if name == DP_ZERO:
        return dp_zero_state(checkpoint.index.objects, checkpoint.reader)
    return bucket_state(checkpoint.index.arrays, checkpoint.object)
