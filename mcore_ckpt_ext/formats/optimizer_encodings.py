"""The optimizer formats: which packing rules and which versions belong to each, and the codec that reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.base import Checkpoint, OptimizerState
from mcore_ckpt_ext.formats.bucket_formats import BUCKET_SPACE, DP_RESHARDABLE, bucket_state, optimizer_children
from mcore_ckpt_ext.formats.dcp_index import DcpIndex
from mcore_ckpt_ext.formats.dp_zero import LEGACY, dp_zero_state
from mcore_ckpt_ext.formats.dp_zero import NAME as DP_ZERO
from mcore_ckpt_ext.formats.flat_buffers import FlatBuffers, FlatState
from mcore_ckpt_ext.formats.model_space_state import FULLY_RESHARDABLE, MODEL_SPACE, ModelSpaceState
from mcore_ckpt_ext.formats.shifted_state import repaired
from mcore_ckpt_ext.layout.grad_buffer import PackingRule

_ALL_RULES = (PackingRule.SINCE_0_13, PackingRule.UNTIL_0_12, PackingRule.UNTIL_0_8, PackingRule.UNTIL_0_7)

# The packing rules of the versions that wrote each flat format.
_RULES: Mapping[str, Sequence[PackingRule]] = {
    DP_RESHARDABLE: (PackingRule.SINCE_0_13,),
    BUCKET_SPACE: (PackingRule.UNTIL_0_7, PackingRule.UNTIL_0_8, PackingRule.UNTIL_0_12),
    DP_ZERO: _ALL_RULES,
    LEGACY: _ALL_RULES,
}
_QUANTISED = "torch.uint8"
_QUANTISING = ("fp8_param_gather", "fp4_param_gather")
_MODEL_SPACE_MASTER = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?:fp32_param|param)\.")
FLAT_FORMATS = tuple(_RULES)
FORMATS = (*FLAT_FORMATS, FULLY_RESHARDABLE, MODEL_SPACE)


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
    return name not in (DP_ZERO, LEGACY) or not placement_changed


def open_optimizer(checkpoint: Checkpoint, index: DcpIndex, read_object: Callable[[str], Any]) -> OptimizerState:
    """The optimizer state of a torch_dist checkpoint.

    Args:
        checkpoint: the checkpoint that it belongs to.
        index: what its `.metadata` says.
        read_object: reads a pickled object of the checkpoint by key.

    Raises:
        UnsupportedCheckpointError: there is none, or in a format that is not read.
    """
    name = checkpoint.optimizer_format
    check_provable(checkpoint, index)
    if name == MODEL_SPACE:
        return ModelSpaceState(index)
    if name == FULLY_RESHARDABLE:
        written = ModelSpaceState(index)
        orders = checkpoint.orders()
        return repaired(written, checkpoint.models, orders, checkpoint.weights, checkpoint.transfer)
    if name == DP_ZERO:
        return flat_optimizer(checkpoint, name, dp_zero_state(index.objects, read_object))
    if name in (DP_RESHARDABLE, BUCKET_SPACE):
        return flat_optimizer(checkpoint, name, bucket_state(index, read_object))
    raise UnsupportedCheckpointError(
        "the optimizer state is in a format that this version does not read",
        found=name,
        expected=", ".join(FORMATS),
        where=str(checkpoint.folder),
    )


def check_provable(checkpoint: Checkpoint, index: DcpIndex) -> None:
    """Refuse optimizer state that no weight can prove.

    With `--fp8-param-gather` (or fp4) the stored weights are dequantised ones, and a buffer's parameter dtype is uint8
    (param_and_grad_buffer.py, core_v0.9.0 to 0.19.2). A precision-aware optimizer stores fp32 masters, except for
    `store_param_remainders`: the low 16 bits alone, as int16 (distrib_optimizer.py, core_v0.13.0 to 0.19.2).

    Raises:
        UnsupportedCheckpointError: it is of such a kind.
    """
    found = _quantised(checkpoint, index)
    if found:
        raise UnsupportedCheckpointError(
            "the optimizer state cannot be proven: no weight is the plain rounding of an fp32 master",
            found=found,
            where=str(checkpoint.folder),
            helps="under the layout that wrote it, resume without that option and save; or resume with --no-load-optim",
        )
    if checkpoint.optimizer_format != FULLY_RESHARDABLE and _transposes_experts(checkpoint.args):
        raise UnsupportedCheckpointError(
            "the optimizer state of the experts cannot be placed: it is transposed, and the weights are not",
            found="GroupedMLP: --moe-grouped-gemm without Transformer Engine's grouped linear layers",
            where=str(checkpoint.folder),
            helps="under the layout that wrote it, save once with --dist-ckpt-optim-fully-reshardable (0.15, 0.16); "
            "or resume with --no-load-optim",
        )


def _quantised(checkpoint: Checkpoint, index: DcpIndex) -> str | None:
    masters = [array for key, array in index.arrays.items() if is_master(key)]
    if narrow := next((array for array in masters if array.dtype != "float32"), None):
        return f"masters of {narrow.dtype}: a precision-aware optimizer with remainders in place of whole masters"
    if any(f"({_QUANTISED}," in key for key in (*index.arrays, *index.objects)):
        return f"gradient buffers for parameters of {_QUANTISED}: fp8 or fp4 primary weights"
    if chosen := [name for name in _QUANTISING if checkpoint.args.get(name)]:
        return f"{' and '.join(chosen)} in the arguments of the job that wrote it: fp8 or fp4 primary weights"
    return None


def _transposes_experts(arguments: Mapping[str, Any]) -> bool:
    """Whether the job's experts were `GroupedMLP` (megatron/core/transformer/moe/experts.py, core_v0.7.0 to 0.16.1).

    It keeps one matrix for all experts of a rank, transposed; `sharded_state_dict` turns its weights, not the flat
    optimizer state. Who chooses it: megatron/core/models/gpt/moe_module_specs.py (core_v0.11.0 to 0.16.1); what an
    older version chose, its arguments do not tell, and the proof decides.
    """
    chosen = arguments.get("moe_use_legacy_grouped_gemm")
    return bool(arguments.get("moe_grouped_gemm")) and bool(
        chosen or (chosen is not None and arguments.get("transformer_impl") == "local")
    )


def is_master(key: str) -> bool:
    """Whether the array of a sharded key holds masters, in any torch_dist format."""
    return key.endswith(".param") if ".gbuf_idx_" in key else bool(_MODEL_SPACE_MASTER.match(key))


def flat_optimizer(checkpoint: Checkpoint, name: str, state: FlatState) -> FlatBuffers:
    """The optimizer state in the flat buffers of a format."""
    rules = _RULES[name]
    proposals = partial(checkpoint.proposals, rules)
    return FlatBuffers(state, checkpoint.models, proposals, checkpoint.weights, checkpoint.transfer)


def has_experts_apart(index: DcpIndex, arguments: Mapping[str, Any]) -> bool:
    """Whether experts have an optimizer of their own: one chained optimizer more than the dense chunks need."""
    children = optimizer_children([*index.arrays, *index.objects])
    return children > 1 + bool(arguments.get("overlap_param_gather_with_optimizer_step"))
