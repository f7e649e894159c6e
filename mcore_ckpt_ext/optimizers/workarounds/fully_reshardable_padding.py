"""`fully_reshardable` of Megatron 0.15.0 to 0.19.2 with end padding in a bucket other than the last.

The writer joins a buffer's buckets without the padding at their ends, then extracts the parameters at positions that
still include it (`sharded_param_state_fully_reshardable`, megatron/core/optimizer/distrib_optimizer.py; fixed by commit
32a03b77 of 2026-08-21, which is in no release). So the slot of a parameter contains elements of later positions. Those
that fall into an alignment gap, or into the slot of a replica that is not saved, are lost. If the layout of the buffers
is known, all others can be found in the neighbors' slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_ckpt_ext.layout.buckets import Placement
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels, ModelRank
from mcore_ckpt_ext.layout.master_check import Mismatch, first_mismatch
from mcore_ckpt_ext.layout.packing_proposals import PackedBuffer, pack_buffers
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.optimizers.flat_arrays import FlatArray, FlatPiece, cut
from mcore_ckpt_ext.optimizers.model_space_state import ModelSpaceState
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.state_view import StateView
from mcore_ckpt_ext.planning.overlap import Piece, overlap
from mcore_ckpt_ext.planning.plan import Source, StoredSlice
from mcore_ckpt_ext.transfer import Transfer, read_slice

_SAMPLE = 64


@dataclass(frozen=True)
class _Shifted:
    """A local parameter whose slot contains other elements, and its position in the joined buffer."""

    rank: ModelRank
    placement: Placement
    buffer: PackedBuffer


def unshift(written: ModelSpaceState, models: LocalModels, shifted: Mapping[str, Sequence[_Shifted]]) -> OptimizerState:
    """Return a `fully_reshardable` state that reads shifted parameters from their elements' positions.

    Lost elements are missing from `stored_slices`, so that planning their tensor is refused.
    """

    def stored_slices(kind: str, name: str) -> Sequence[StoredSlice]:
        if name not in shifted:
            return written.stored_slices(kind, name)
        return [
            piece
            for parameter in shifted[name]
            for piece in cut(parameter.placement, _join_buffers(written, models, kind, parameter))
        ]

    def lost_intervals(kind: str, name: str) -> list[tuple[int, int]]:
        tensor = written.logical_tensor(kind, name)
        if tensor is None:
            return []
        whole = Region.whole(name, tensor.shape)
        pieces = [
            Piece(region, start, stop, 0)
            for stored_slice in stored_slices(kind, name)
            for region, start, stop, _ in stored_slice.slice.pieces()
        ]
        return overlap(tensor.shape, Piece(whole, 0, whole.numel, 0), pieces).missing

    def lost_elements() -> dict[str, int]:
        counts = {
            name: sum(last - first for first, last in lost_intervals(FP32_PARAM, name)) for name in sorted(shifted)
        }
        return {name: count for name, count in counts.items() if count}

    return replace(
        StateView.of(written),
        stored_slices=stored_slices,
        lost_intervals=lost_intervals,
        lost_elements=lost_elements,
        shifted=sorted(shifted),
        order_sources=lambda: ["the arrays' own names, repaired where Megatron wrote them shifted"],
    )


def repair(
    written: ModelSpaceState,
    models: LocalModels,
    orders: Iterable[ParameterOrder],
    weights: Source,
    transfer: Transfer,
) -> OptimizerState:
    """Return the state as written if correct, or else repaired by the first parameter order that passes.

    If none passes, it is returned as written; the master check then refuses wrong values.
    """
    for order in orders:
        shifted = _shifted_parameters(models, order)
        if not shifted or masters_hold(written, shifted, weights, transfer):
            return written
        state = unshift(written, models, shifted)
        if masters_hold(state, shifted, weights, transfer):
            return state
    return written


def shifted_names(models: LocalModels, order: ParameterOrder) -> list[str]:
    """Return the parameters whose slots contain other elements.

    Ranks and order are assumed to be those of the writer.
    """
    return list(_shifted_parameters(models, order))


def _shifted_parameters(models: LocalModels, order: ParameterOrder) -> dict[str, list[_Shifted]]:
    """Return all local parameters after some end padding, by name, the preferred copy first."""
    shifted: dict[str, list[_Shifted]] = {}
    ranks = {rank for name in models.weights for rank in models.ranks_of(name)}
    for rank in sorted(ranks, key=lambda rank: (rank.pipeline, rank.tensor, rank.expert is not None, rank.expert or 0)):
        stages = range(models.layout.virtual_pipeline)
        for buffer in pack_buffers(models, order, PackingRule.SINCE_0_13, rank, stages) or []:
            for origin, bucket in zip(buffer.joined_origins(), buffer.buckets, strict=True):
                for index, start, _ in bucket.placements if origin != bucket.start else ():
                    placement = buffer.placement(index, origin + start)
                    if rank in models.ranks_of(placement.name):
                        shifted.setdefault(placement.name, []).append(_Shifted(rank, placement, buffer))
    return shifted


def _join_buffers(written: ModelSpaceState, models: LocalModels, kind: str, shifted: _Shifted) -> FlatArray:
    """Return the joined buffer of one rank, as far as it is in slots that this rank saved.

    The slot of a parameter at padded position p contains the elements from p on of the joined buffer, and zeros beyond
    its end.
    """
    buffer = shifted.buffer
    end = sum(bucket.numel_unpadded for bucket in buffer.buckets)
    pieces: list[FlatPiece] = []
    for bucket in buffer.buckets:
        for index, start, _ in bucket.placements:
            position = bucket.start + start
            for region in buffer.regions[index]:
                stop = min(position + region.numel, end)
                if position < stop and _saves(models, shifted.rank, region.name):
                    slots = [
                        slot for slot in written.stored_slices(kind, region.name) if slot.slice.regions == (region,)
                    ]
                    pieces += [FlatPiece(position, stop, slot.extent, slot.first) for slot in slots]
                position += region.numel
    return FlatArray(end, "float32", tuple(pieces))


def _saves(models: LocalModels, rank: ModelRank, name: str) -> bool:
    """Return whether this rank filled the slot of a parameter; replicas and the tied copy are not saved."""
    holders = models.ranks_of(name)
    return rank in holders and rank.pipeline == holders[0].pipeline


def masters_hold(
    state: Source,
    names: Iterable[str],
    weights: Source,
    transfer: Transfer,
    mismatch: Callable[[torch.Tensor, torch.Tensor], Mismatch | None] = first_mismatch,
) -> bool:
    """Return whether samples of the masters of some parameters round to their weights."""
    for name in names:
        stored = state.stored_slices(FP32_PARAM, name)
        for piece in stored[:1]:
            start = piece.slice.start
            stop = min(piece.slice.stop, piece.slice.start + _SAMPLE)
            sample = Slice(piece.slice.regions, start, stop)
            master = read_slice(state, transfer, FP32_PARAM, sample)
            if mismatch(master, read_slice(weights, transfer, WEIGHT, sample)) is not None:
                return False
    return True
