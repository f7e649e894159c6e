"""The optimizer format `dp_reshardable`: flat gradient buffers, one array a bucket and kind.

Source: `DistributedOptimizer.sharded_param_state_dp_reshardable` (megatron/core/optimizer/distrib_optimizer.py,
core_v0.15.0 to 0.19.2). Each rank writes a chunk for each of its parameter pieces and for each gap.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mcore_ckpt_ext.errors import LayoutError
from mcore_ckpt_ext.formats.dcp_index import StoredArray
from mcore_ckpt_ext.layout.buckets import BucketKey, OptimizerGroup, Placement, StoredBucket
from mcore_ckpt_ext.layout.discovery import irregularity
from mcore_ckpt_ext.layout.local_model import LocalModels, ModelRank
from mcore_ckpt_ext.layout.recover import Proposal, RecoveredLayout, recover
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, LogicalTensor
from mcore_ckpt_ext.planning.plan import Source, StoredSlice
from mcore_ckpt_ext.transfer import Transfer, read_slice

NAME = "dp_reshardable"

_KEY = re.compile(
    r"^(?:chained_(?P<child>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtypes>\(.*\))\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)$"
)
# The masters are called `param` in the buffers; every other state keeps its name.
_KINDS = {"param": FP32_PARAM}


# A chained optimizer's number and Megatron's `dp_group_idx`.
GroupKey = tuple[int, int]


class DpReshardable:
    """The optimizer state of a checkpoint, group by group; layouts are recovered when first asked for."""

    def __init__(
        self,
        arrays: Mapping[str, StoredArray],
        models: LocalModels,
        proposals: Callable[[], Sequence[Proposal]],
        weights: Source,
        transfer: Transfer,
    ) -> None:
        self._models = models
        self._proposals = proposals
        self._weights = weights
        self._transfer = transfer
        self._recovered: dict[GroupKey, RecoveredLayout] = {}
        self._arrays: dict[GroupKey, dict[tuple[BucketKey, str], StoredArray]] = {}
        for name, array in arrays.items():
            if match := _KEY.match(name):
                key = BucketKey(int(match["buffer"]), match["dtypes"], int(match["bucket"]))
                kind = _KINDS.get(match["state"], match["state"])
                self._arrays.setdefault((int(match["child"] or 0), int(match["group"])), {})[key, kind] = array
        self.kinds = tuple(dict.fromkeys(kind for arrays_of in self._arrays.values() for _, kind in arrays_of))
        self.groups = {key: self._group(*key) for key in sorted(self._arrays)}

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """The tensor as the checkpoint knows it: the weight's shape, the state's dtype."""
        weight = self._models.weights.get(name)
        if weight is None or kind not in self.kinds:
            return None
        if not any(self.stored(kind, name)):
            return None
        dtype = next(a.dtype for arrays in self._arrays.values() for (_, k), a in arrays.items() if k == kind)
        return LogicalTensor(name, weight.tensor.shape, dtype)

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """All stored slices of one tensor, replicas after what they repeat."""
        slices: list[StoredSlice] = []
        for group in self._groups_of(name):
            for key, placements in self.layout_of(group).layout.items():
                array = self._arrays[group.child, group.index].get((key, kind))
                for placement in placements:
                    if array is not None and placement.name == name:
                        slices.extend(_cut(placement, array))
        return slices

    def layout_of(self, group: OptimizerGroup) -> RecoveredLayout:
        """The layout of one group, recovered on first use.

        Raises:
            LayoutError: it cannot be proven.
        """
        if self._recover(group).discovered:
            # An unknown order shows everywhere in the same way; damage shows in one place.
            layouts = [self._recover(other).layout for other in self.groups.values()]
            if problem := irregularity(layouts):
                raise LayoutError(
                    "no layout of the gradient buffers could be proven: what fits by content is no order of modules",
                    found=problem,
                    where=str(group),
                    helps="the checkpoint is damaged or was edited: resume from another iteration",
                )
        return self._recover(group)

    def _recover(self, group: OptimizerGroup) -> RecoveredLayout:
        key = (group.child, group.index)
        if key not in self._recovered:
            self._recovered[key] = recover(group, self._models, self._proposals(), self)
        return self._recovered[key]

    def witnesses(self) -> list[str]:
        """What the layouts recovered so far came from."""
        return sorted({recovered.witness for recovered in self._recovered.values()})

    def names(self) -> list[str]:
        """All parameters with optimizer state."""
        found = {
            placement.name: None
            for group in self.groups.values()
            for placements in self.layout_of(group).layout.values()
            for placement in placements
        }
        return list(found)

    def master(self, group: OptimizerGroup, key: BucketKey, start: int, count: int) -> torch.Tensor:
        """See `layout.buckets.Bytes`."""
        source = _FlatArray(self._arrays[group.child, group.index][key, FP32_PARAM])
        whole = Region.whole(source.array.key, source.array.shape)
        return read_slice(source, self._transfer, FP32_PARAM, Slice((whole,), start, start + count))

    def weight(self, regions: tuple[Region, ...], start: int, count: int) -> torch.Tensor:
        """See `layout.buckets.Bytes`."""
        return read_slice(self._weights, self._transfer, "weight", Slice(regions, start, start + count))

    def _groups_of(self, name: str) -> list[OptimizerGroup]:
        ranks = self._models.ranks_of(name)
        return [group for rank in ranks for group in self._by_rank.get(rank, [])]

    @cached_property
    def _by_rank(self) -> dict[ModelRank, list[OptimizerGroup]]:
        found: dict[ModelRank, list[OptimizerGroup]] = {}
        for group in self.groups.values():
            found.setdefault(group.rank, []).append(group)
        return found

    def _group(self, child: int, index: int) -> OptimizerGroup:
        """The group of a chained optimizer and `dp_group_idx`, by the rules of `get_megatron_optimizer`.

        Source: megatron/core/optimizer/__init__.py, core_v0.15.0 to 0.19.2. `dp_group_idx` is the rank in the
        model-parallel group: tensor ranks run fastest, then, for experts, expert ranks, then pipeline ranks. Experts
        are the last chained optimizer; with `--overlap-param-gather-with-optimizer-step` the first model chunk has
        an optimizer of its own.
        """
        layout = self._models.layout
        first_chunk_apart = bool(self._models.arguments.get("overlap_param_gather_with_optimizer_step"))
        stages = range(layout.virtual_pipeline)
        if self._models.experts_apart and child == max(number for number, _ in self._arrays):
            rest, tensor = divmod(index, layout.expert_tensor)
            pipeline, expert = divmod(rest, layout.expert)
            rank = ModelRank(pipeline, tensor, expert)
        else:
            pipeline, tensor = divmod(index, layout.tensor)
            rank = ModelRank(pipeline, tensor)
            if first_chunk_apart:
                stages = stages[:1] if child == 0 else stages[1:]
        if pipeline >= layout.pipeline:
            raise LayoutError(
                "the checkpoint holds an optimizer group that its own layout has no room for",
                found=f"dp_group_idx_{index} of optimizer {child}",
                expected=str(layout),
            )
        buckets: dict[BucketKey, StoredBucket] = {}
        for (key, kind), array in self._arrays[child, index].items():
            if kind == FP32_PARAM:
                borders = {c.offsets[0] for c in array.chunks} | {c.offsets[0] + c.sizes[0] for c in array.chunks}
                buckets[key] = StoredBucket(array.shape[0], tuple(sorted(borders)))
        return OptimizerGroup(child, index, rank, stages, buckets)


def has_experts_apart(keys: Iterable[str], arguments: Mapping[str, Any]) -> bool:
    """Whether experts have an optimizer of their own: one chained optimizer more than the dense chunks need."""
    children = {int(match["child"] or 0) for key in keys if (match := _KEY.match(key))}
    return len(children) > 1 + bool(arguments.get("overlap_param_gather_with_optimizer_step"))


@dataclass(frozen=True)
class _FlatArray:
    """A stored array as a source of its own, one logical tensor named by its key."""

    array: StoredArray

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return [
            StoredSlice(Slice.whole((Region(name, chunk.offsets, chunk.sizes),)), chunk.extent, 0)
            for chunk in self.array.chunks
        ]

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        return LogicalTensor(name, self.array.shape, self.array.dtype)


def _cut(placement: Placement, array: StoredArray) -> list[StoredSlice]:
    """The pieces of a placed parameter that the chunks of its bucket hold."""
    pieces = []
    for chunk in array.chunks:
        low = max(placement.start, chunk.offsets[0])
        high = min(placement.stop, chunk.offsets[0] + chunk.sizes[0])
        if low < high:
            piece = Slice(placement.regions, low - placement.start, high - placement.start)
            pieces.append(StoredSlice(piece, chunk.extent, low - chunk.offsets[0]))
    return pieces
