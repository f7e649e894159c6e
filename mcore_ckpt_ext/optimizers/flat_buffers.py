"""Optimizer state in flat gradient buffers: the common part of all such formats.

A format lists its flat arrays; the positions of parameters in them are recovered from the sources of the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from typing_extensions import override

from mcore_ckpt_ext.errors import PackingError
from mcore_ckpt_ext.job.releases import ALIGNS_PARAMETERS, EXPERT_RANKS_RUN_SLOWEST
from mcore_ckpt_ext.layout.buckets import BucketKey, OptimizerGroup, Placement, StoredBucket
from mcore_ckpt_ext.layout.grad_buffer import PARAMETER_ALIGNMENT, PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels, ModelRank
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING, MasterCheck, master_check_of
from mcore_ckpt_ext.layout.packing_proposals import Proposal
from mcore_ckpt_ext.layout.packing_recovery import (
    RecoveredPacking,
    propose_packing,
    recover_packing,
    recover_unverified_packing,
)
from mcore_ckpt_ext.layout.packing_search import irregularity
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER, STALE_MASTER, LogicalTensor
from mcore_ckpt_ext.optimizers.digests import are_of_another_save, contradicts
from mcore_ckpt_ext.optimizers.flat_arrays import (
    MASTERS,
    Buffers,
    FlatArray,
    FlatState,
    GroupKey,
    cut,
)
from mcore_ckpt_ext.optimizers.flat_samples import FlatSamples
from mcore_ckpt_ext.optimizers.optimizer_format import Holder
from mcore_ckpt_ext.optimizers.stale_masters import with_stale_masters
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import Copies, Source, StoredSlice
from mcore_ckpt_ext.transfer import Transfer

# Masters that match any weight, or none.
_UNPROVABLE = (PARAM_REMAINDER, STALE_MASTER)


class FlatBuffers(OptimizerState):
    """The optimizer state of a checkpoint, group by group; packings are recovered on first use."""

    def __init__(
        self,
        state: FlatState,
        models: LocalModels,
        proposals: Callable[[], Sequence[Proposal]],
        weights: Source,
        transfer: Transfer,
        master_check: MasterCheck = BY_ROUNDING,
        sidecar: Sidecar | None = None,
    ) -> None:
        self._master_check = master_check
        self.models = models
        self.transfer = transfer
        self._sidecar = sidecar
        self._proposals = proposals
        self._weights = weights
        self._recovered: dict[GroupKey, RecoveredPacking] = {}
        self._by_tensor: dict[GroupKey, dict[str, list[tuple[BucketKey, Placement]]]] = {}
        self._places: dict[str, list[tuple[Mapping[tuple[BucketKey, str], FlatArray], BucketKey, Placement]]] = {}
        self._state = state
        self.arrays = state.arrays
        self._samples = FlatSamples(state.arrays, weights, transfer, master_check)
        self.kinds = tuple(dict.fromkeys(kind for arrays_of in self.arrays.values() for _, kind in arrays_of))
        self.groups = {key: self._group(*key) for key in sorted(self.arrays)}

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name of a tensor with the weight's shape and the state's dtype; None if not stored."""
        weight = self.models.weights.get(name)
        if weight is None or kind not in self.kinds:
            return None
        if next(self._slices(kind, name), None) is None:
            return None
        return LogicalTensor(name, weight.tensor.shape, self._dtypes[kind])

    @override
    def dtypes_of(self, name: str) -> Mapping[str, str]:
        return self._dtypes if name in self.models.weights else {}

    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return all stored slices of one tensor, replicas after the first copy."""
        return list(self._slices(kind, name))

    def _slices(self, kind: str, name: str) -> Iterator[StoredSlice]:
        places = self._places.get(name)
        if places is None:
            places = self._places[name] = [
                (self.arrays[group.child, group.index], key, placement)
                for rank in self.models.ranks_of(name)
                for group in self._groups_by_rank.get(rank, [])
                for key, placement in self._places_in(group).get(name, ())
            ]
        for arrays, key, placement in places:
            if (key, kind) in arrays:
                yield from cut(placement, arrays[key, kind])

    @cached_property
    def _dtypes(self) -> Mapping[str, str]:
        dtypes: dict[str, str] = {}
        for arrays in self.arrays.values():
            for (_, kind), array in arrays.items():
                dtypes.setdefault(kind, array.dtype)
        return dtypes

    def _places_in(self, group: OptimizerGroup) -> dict[str, list[tuple[BucketKey, Placement]]]:
        """Return the positions of each tensor in the buckets of one group, by name."""
        places = self._by_tensor.get((group.child, group.index))
        if places is None:
            packing = self.packing_of(group).packing
            places = {}
            for key, placements in packing.items():
                for placement in placements:
                    for name in dict.fromkeys(region.name for region in placement.regions):
                        places.setdefault(name, []).append((key, placement))
            self._by_tensor[group.child, group.index] = places
        return places

    @cached_property
    def digests(self) -> Mapping[GroupKey, Mapping[str, Mapping[str, str]]]:
        """The digests that the sidecar recorded at the save, by group, parameter and kind; empty if stale."""
        return {} if self._staleness else self._recorded_digests

    @property
    def _recorded_digests(self) -> Mapping[GroupKey, Mapping[str, Mapping[str, str]]]:
        digests = self._sidecar.digests if self._sidecar else ()
        return {(recorded.child, recorded.index): recorded.parameters for recorded in digests}

    @cached_property
    def _staleness(self) -> str | None:
        """Why a sidecar that does not record its index is stale, according to its digests; None if it is not."""
        recorded = self._recorded_digests
        if self._sidecar is None or self._sidecar.index or not recorded:
            return None
        another = are_of_another_save(self, recorded, self._proposals())
        return "it is stale: none of its digests matches the stored state" if another else None

    @property
    @override
    def buffers(self) -> Sequence[Buffers]:
        return (self,)

    def copies(self, kind: str, name: str) -> Copies:
        """Return the copies of each part of a tensor that some rank had, each copy as slices.

        Tensor-parallel ranks have copies of replicated parameters, pipeline ranks copies of a tied embedding.
        """
        parts: dict[tuple[Region, ...], list[list[StoredSlice]]] = {}
        for group, key, placement in self._placed.get(name, ()):
            array = self.arrays[group.child, group.index].get((key, kind))
            slices = [] if array is None else cut(placement, array)
            tensor_regions = tuple(region for region in placement.regions if region.name == name)
            parts.setdefault(tensor_regions, []).append(
                [part for stored in slices for part in _slices_of_part(stored, name)]
            )
        return list(parts.values())

    @cached_property
    def _placed(self) -> dict[str, list[tuple[OptimizerGroup, BucketKey, Placement]]]:
        """All placements of all groups, by names of tensors in them, which may be parts of a parameter."""
        placed: dict[str, list[tuple[OptimizerGroup, BucketKey, Placement]]] = {}
        for group in self.groups.values():
            for name, places in self._places_in(group).items():
                placed.setdefault(name, []).extend((group, key, placement) for key, placement in places)
        return placed

    def proposed_packings(self) -> dict[GroupKey, RecoveredPacking | None]:
        """Return each group's first candidate that fits sizes and chunk borders, without reading content."""
        proposals = self._proposals()
        return {key: propose_packing(group, proposals) for key, group in self.groups.items()}

    def packing_of(self, group: OptimizerGroup) -> RecoveredPacking:
        """Return the packing of one group, recovered on first use.

        Raises:
            PackingError: no packing can be verified, or it does not have all experts.
        """
        if self.models.mixes_experts:
            raise PackingError(
                "the optimizer does not have every expert once: before 0.19, Megatron mixes parts of experts, or "
                "trains copies of them apart, where ETP is not TP and there is no expert parallelism",
                found=str(self.models.layout),
                hint="go on with the weights alone: --no-load-optim, under a layout where ETP is TP",
            )
        if self._recover(group).discovered:
            # An unknown order is the same everywhere; damage affects one place.
            packings = [self._recover(other).packing for other in self.groups.values()]
            if problem := irregularity(packings):
                raise PackingError(
                    "no packing of the gradient buffers could be verified: the packing found by content "
                    "is no order of modules",
                    found=problem,
                    where=str(group),
                    hint="the checkpoint is damaged or was edited: resume from another iteration",
                )
        return self._recover(group)

    @cached_property
    def _lacks_weights(self) -> bool:
        """True if some weights cannot be read here.

        Then the packing has to be certain, and is verified on filling.
        """
        return any(self._weights.logical_tensor("weight", name) is None for name in self.models.weights)

    def _recover(self, group: OptimizerGroup) -> RecoveredPacking:
        key = (group.child, group.index)
        if key not in self._recovered:
            is_unprovable = self._state.has_numbers or any(kind in _UNPROVABLE for _, kind in self.arrays[key])
            if self._lacks_weights or is_unprovable:
                contradiction = partial(contradicts, self, group)
                stale = self._staleness
                proposals = [proposal for proposal in self._proposals() if not (stale and proposal.is_recorded)]
                recovered = recover_unverified_packing(
                    group, self.models, proposals, contradiction, is_recorded=key in self.digests
                )
                self._recovered[key] = replace(recovered, sidecar_problem=stale)
            else:
                self._recovered[key] = recover_packing(group, self.models, self._proposals(), self._samples)
        return self._recovered[key]

    def order_sources(self) -> list[str]:
        """Return the sources of the packings that were recovered so far."""
        return sorted(
            {
                f"{recovered.order_source} instead of the sidecar"
                if recovered.sidecar_problem
                else recovered.order_source
                for recovered in self._recovered.values()
            }
        )

    def sidecar_problems(self) -> list[str]:
        """Return why the sidecar's packing is rejected, for each group; recovers all packings.

        Raises:
            PackingError: the packing of a group cannot be verified.
        """
        reasons = [(group, self.packing_of(group).sidecar_problem) for group in self.groups.values()]
        return [f"{group}: {reason}" for group, reason in reasons if reason is not None]

    @override
    def names(self, kind: str | None = None) -> list[str]:
        names = {
            region.name: None
            for group in self.groups.values()
            for key, placements in self.packing_of(group).packing.items()
            if kind is None or (key, kind) in self.arrays[group.child, group.index]
            for placement in placements
            for region in placement.regions
        }
        return list(names)

    @cached_property
    def _groups_by_rank(self) -> dict[ModelRank, list[OptimizerGroup]]:
        groups: dict[ModelRank, list[OptimizerGroup]] = {}
        for group in self.groups.values():
            groups.setdefault(group.rank, []).append(group)
        return groups

    @cached_property
    def _last_child(self) -> int:
        """The number of the last chained optimizer."""
        return max(child for child, _ in self.arrays)

    def _group(self, child: int, index: int) -> OptimizerGroup:
        """Return the group of a chained optimizer and `dp_group_idx`, by `get_megatron_optimizer`'s rules.

        Source: megatron/core/optimizer/__init__.py, core_v0.7.0 to 0.19.2. `dp_group_idx` is the rank in the
        model-parallel group: tensor ranks vary fastest, then, for experts, expert ranks, then pipeline ranks. Up to
        0.9, which had no expert tensor parallelism, expert ranks varied slowest. Shards of generalized tensor
        parallelism vary after tensor ranks (`mp_group`, parallel_state.py, 'tp-gtp_remat-pp', 0.19.2). Experts are the
        last chained optimizer; with `--overlap-param-gather-with-optimizer-step` the first model chunk has an optimizer
        of its own.
        """
        layout = self.models.layout
        first_chunk_apart = bool(self.models.arguments.overlap_param_gather_with_optimizer_step)
        stages = range(layout.virtual_pipeline)
        if self.models.has_expert_optimizer and child == self._last_child:
            rest, tensor = divmod(index, layout.expert_tensor)
            if EXPERT_RANKS_RUN_SLOWEST.is_shown_by(self.models.arguments):
                expert, pipeline = divmod(rest, layout.pipeline)
            else:
                pipeline, expert = divmod(rest, layout.expert)
            rank = ModelRank(pipeline, tensor, expert)
        else:
            rest, tensor = divmod(index, layout.tensor)
            pipeline, shard = divmod(rest, self.models.weight_shards)
            rank = ModelRank(pipeline, tensor, shard=shard)
            if first_chunk_apart:
                stages = stages[:1] if child == 0 else stages[1:]
        if pipeline >= layout.pipeline:
            raise PackingError(
                "the checkpoint has an optimizer group that does not exist in its layout",
                found=f"dp_group_idx_{index} of optimizer {child}",
                expected=str(layout),
            )
        buckets: dict[BucketKey, StoredBucket] = {}
        for (key, kind), array in self.arrays[child, index].items():
            if kind in MASTERS:
                borders = {*array.starts, *array.stops}
                buckets[key] = StoredBucket(array.numel, tuple(sorted(borders)) if self._state.chunked else None)
        alignment = PARAMETER_ALIGNMENT if ALIGNS_PARAMETERS.is_shown_by(self.models.arguments) else 1
        return OptimizerGroup(child, index, rank, stages, buckets, self._state.joined, alignment)


def flat_optimizer(holder: Holder, state: FlatState, rules: Sequence[PackingRule], models: LocalModels) -> FlatBuffers:
    """Return the optimizer state in flat arrays, with the parameters of `models`.

    Args:
        holder: the checkpoint.
        state: its flat arrays.
        rules: the packing rules of the versions that wrote such arrays.
        models: the parameters that may be in them.
    """
    proposals = partial(holder.proposals, rules, models)
    master_check = master_check_of(holder.arguments)
    state = with_stale_masters(state, holder.arguments)
    return FlatBuffers(state, models, proposals, holder.weights(), holder.transfer, master_check, holder.sidecar)


def _slices_of_part(stored: StoredSlice, name: str) -> Iterator[StoredSlice]:
    """Yield one part's share of a slice of a split parameter; the regions of a part are contiguous."""
    regions = stored.slice.regions
    tensor_regions = tuple(region for region in regions if region.name == name)
    if tensor_regions == regions:
        yield stored
        return
    before = sum(region.numel for region in regions[: regions.index(tensor_regions[0])])
    start = max(stored.slice.start - before, 0)
    stop = min(stored.slice.stop - before, sum(region.numel for region in tensor_regions))
    if start < stop:
        yield StoredSlice(
            Slice(tensor_regions, start, stop), stored.extent, stored.first + start + before - stored.slice.start
        )
