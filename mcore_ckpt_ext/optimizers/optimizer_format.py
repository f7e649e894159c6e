"""An encoding: one format of an optimizer's state in a checkpoint, and all its properties."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import Capability
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.packing_proposals import Proposal, propose_by_order, propose_by_sidecar
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import Source
from mcore_ckpt_ext.storage.index_entries import StoredArray, StoredObject
from mcore_ckpt_ext.transfer import Transfer

Version = tuple[int, int]

# Chained optimizers may mark their keys, chains of chains twice (`ChainedOptimizer.sharded_state_dict`,
# megatron/core/optimizer/optimizer.py, core_v0.7.0 to 0.19.2).
CHAIN = r"^(?P<chain>(?:chained_\d+\.)*)"
_OPTIMIZER_KEY = re.compile(CHAIN + r"optimizer\.")
_BESIDE_BUFFERS = re.compile(
    r"\.(optimizer|grad_scaler|param_state|param_state_sharding_type|per_bucket_numel(_unpadded)?)/shard_\d+_\d+$"
)


def is_of_group(key: str) -> bool:
    """Return whether an object stored with gradient buffers is read, or is derived from those that are.

    Source: `sharded_state_dict` of `DistributedOptimizer`, megatron/core/optimizer/distrib_optimizer.py, core_v0.6.0 to
    0.19.2.
    """
    return bool(_BESIDE_BUFFERS.search(key))


@dataclass(frozen=True)
class Holder:
    """The part of a checkpoint that an encoding needs to read its state.

    Attributes:
        folder: the iteration folder.
        transfer: reads its files.
        arguments: the known arguments of the job that wrote it.
        weights: returns the model's arrays.
        models: returns the local parameters of the ranks that wrote it.
        sidecar: the sidecar, if there is a readable one.
        orders: returns evidence of the order in which parameters were registered.
    """

    folder: Path
    transfer: Transfer
    arguments: JobArguments
    weights: Callable[[], Source]
    models: Callable[[], LocalModels]
    sidecar: Sidecar | None
    orders: Callable[[], Sequence[ParameterOrder]]

    def proposals(self, rules: Sequence[PackingRule], models: LocalModels) -> list[Proposal]:
        """Return candidate packings of the gradient buffers, the most reliable first.

        Args:
            rules: the packing rules that the job may have used.
            models: the parameters in the buffers.
        """
        recorded = [propose_by_sidecar(models, self.sidecar)] if self.sidecar else []
        return recorded + [propose_by_order(models, order, rule) for order in self.orders() for rule in rules]


@dataclass(frozen=True)
class StoredKeys:
    """The stored state of a `torch_dist` checkpoint's optimizers, by key.

    Attributes:
        arrays: by sharded key.
        objects: by key with Megatron's `/shard_...` suffix.
        natural_shapes: the shapes of arrays that are stored reshaped.
        chunks_show_parameters: see `DcpIndex`.
        label: the checkpoint's name of the format; some state may have another format.
        read_object: reads one of the objects.
    """

    arrays: Mapping[str, StoredArray]
    objects: Mapping[str, StoredObject]
    natural_shapes: Mapping[str, tuple[int, ...]]
    chunks_show_parameters: bool
    label: str | None
    read_object: Callable[[str], Any]

    def optimizer_keys(self) -> StoredKeys:
        """Return the keys of optimizers, without those of the model and the job."""
        return self.only([key for key in (*self.arrays, *self.objects) if _OPTIMIZER_KEY.match(key)])

    def only(self, keys: Collection[str]) -> StoredKeys:
        """Return the part with the given keys."""
        chosen = set(keys)
        arrays = {key: array for key, array in self.arrays.items() if key in chosen}
        objects = {key: place for key, place in self.objects.items() if key in chosen}
        return replace(self, arrays=arrays, objects=objects)

    def __iter__(self) -> Any:
        """Yield all keys."""
        yield from self.arrays
        yield from self.objects


@dataclass(frozen=True)
class Encoding:
    """A row of the table.

    Attributes:
        name: Megatron's own name if it has one, as in `param_state_sharding_type`.
        stored: a description of the stored arrays.
        written_by: a description of the optimizers and versions that write it.
        claims: returns the keys of a torch_dist checkpoint in this encoding; each key is in at most one.
        read: reads the state of the claimed keys, given the parameters that no other encoding names.
        stock_loads: the capability of the releases of Megatron that load an intact state correctly; None for all.
        needs_same_buffers: whether they need gradient buffers like those of the job that wrote it.
        note: a note for users who resume it with stock Megatron.
        shows_names: whether the keys of arrays identify parameters; otherwise they are recovered.
        distributed: whether it belongs to a DistributedOptimizer.
        opening_reads_elements: whether the content can be listed only by reading elements.
        may_be_shifted: whether Megatron itself may have written parameters shifted (`OptimizerState.shifted`).
        stores_remainders_in_fp32: whether remainders of masters are stored as fp32 numbers (`numbers_of_remainders`).
        is_reshaped: whether arrays may have other shapes than their parameters.
        labeled_by: the capability of the releases that name it in the content metadata; None if none does.
        is_unlabeled: whether it is the format where no label names one.
        is_copied_in_place: whether Megatron copies it into its live flat buffers, not each parameter's state by itself.
        is_portable: whether conversions to torch_dist write it, since Megatron loads it under any layout.
        is_in_rank_files: whether only legacy checkpoints have it.
    """

    name: str
    stored: str
    written_by: str
    claims: Callable[[StoredKeys], Collection[str]]
    read: Callable[[Holder, StoredKeys, Callable[[], LocalModels]], OptimizerState]
    stock_loads: Capability | None = None
    needs_same_buffers: bool = False
    note: str = ""
    shows_names: bool = True
    distributed: bool = True
    opening_reads_elements: bool = False
    may_be_shifted: bool = False
    stores_remainders_in_fp32: bool = False
    is_reshaped: bool = False
    labeled_by: Capability | None = None
    is_unlabeled: bool = False
    is_copied_in_place: bool = False
    is_portable: bool = False
    is_in_rank_files: bool = False
