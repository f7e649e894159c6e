"""Distributes whole parameters over data-parallel ranks, as layer-wise optimizers do.

Source: `LayerWiseDistributedOptimizer` (megatron/core/optimizer/layer_wise_optimizer.py, core_v0.16.0 to 0.19.2 and the
development head of August 2026). Without a parameter layout it assigns all parameters to ranks in turn, the smallest
first (`shard_params`, `_shard_params_ping_pong`). With a parameter layout it updates only matrices, and packs them into
the shards of a separate buffer (`_compute_per_buffer_param_layout`); a DistributedOptimizer updates the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil, lcm

import numpy as np

from mcore_ckpt_ext.layout.grad_buffer import PARAMETER_ALIGNMENT, align, bucket_alignment
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.local_columns import AFTER_LAYERS, BEFORE_LAYERS, Flags, LocalColumns, Numbers
from mcore_ckpt_ext.layout_choice.model_table import ALL_PARAMETERS, NO_EXPERTS, Holding, ModelTable, StageHolding

# `_NUMEL_EPSILON` of `_compute_per_buffer_param_layout`.
_EXCESS = 0.3


class LayerWise(Enum):
    """How a layer-wise optimizer distributes parameters.

    `DEALT`: all parameters, the smallest first, to the ranks in turn, alternately forward and backward.
    `PACKED_BY_SIZE`: only matrices, the largest first, each to the shard with the fewest elements (0.18.2 to
    0.19.2). `PACKED_BY_COMPUTATION`: only matrices, the most expensive first, each to the shard with the least
    computation so far, unless that shard gets too large (development head of August 2026).
    """

    DEALT = "dealt"
    PACKED_BY_SIZE = "packed by size"
    PACKED_BY_COMPUTATION = "packed by computation"


@dataclass(frozen=True, slots=True)
class Packing:
    """The assignment of matrices to the shards of a buffer.

    Attributes:
        shard_of: the shard of each matrix.
        shard_size: elements of each shard, padding included.
    """

    shard_of: Numbers
    shard_size: int


def deal(elements: Numbers, is_matrix: Flags, ranks: int) -> Numbers:
    """Return the rank of each parameter; of equal sizes, matrices come first, as Muon's groups do."""
    order = np.lexsort((~is_matrix, elements))
    turn = np.arange(len(order)) % (2 * ranks)
    owners = np.empty_like(order)
    owners[order] = np.where(turn < ranks, turn, 2 * ranks - 1 - turn)
    return owners


def pack(rows: Numbers, columns: Numbers, ranks: int, rule: LayerWise, *, high_bandwidth: bool = False) -> Packing:
    """Pack matrices into one shard for each rank.

    Args:
        rows: rows of each matrix on one tensor-parallel rank.
        columns: columns of each matrix on one tensor-parallel rank.
        ranks: number of data-parallel ranks.
        rule: the packing of the release.
        high_bandwidth: `--ddp-pad-buckets-for-high-nccl-busbw`.
    """
    elements = rows * columns
    by_computation = rule is LayerWise.PACKED_BY_COMPUTATION
    # Newton-Schulz iterations multiply a matrix by its transpose (`_ns_compute_cost`).
    cost = elements * np.minimum(rows, columns) if by_computation else elements
    most = elements.sum() / ranks * (1 + _EXCESS)
    ends = np.zeros(ranks, dtype=np.int64)
    done = np.zeros(ranks, dtype=np.int64)
    shard_of = np.zeros_like(elements)
    for index in np.argsort(-cost, kind="stable"):
        starts = -(-ends // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        shard = int(np.argmin(ends))
        if by_computation and (fits := starts + elements[index] <= most).any():
            shard = int(np.argmin(np.where(fits, done, np.iinfo(np.int64).max)))
        shard_of[index] = shard
        ends[shard] = starts[shard] + elements[index]
        done[shard] += cost[index]
    divisor = lcm(PARAMETER_ALIGNMENT, bucket_alignment(ranks, high_bandwidth) // ranks)
    return Packing(shard_of, align(int(np.max(ends)), divisor))


def layer_wise_stages(
    table: ModelTable,
    ranges: Sequence[Sequence[range]],
    layout: ParallelLayout,
    held: Sequence[StageHolding],
    rule: LayerWise,
    *,
    high_bandwidth: bool,
) -> tuple[StageHolding, ...]:
    """Return the share of the fullest rank of each pipeline stage.

    Args:
        table: the model.
        ranges: global decoder layers by `[pipeline rank][virtual stage]`.
        layout: the parallel sizes.
        held: the same stages as returned by `ModelTable.stages`, for all data-parallel ranks together.
        rule: how parameters are distributed.
        high_bandwidth: `--ddp-pad-buckets-for-high-nccl-busbw`.
    """
    is_separate = layout.separates_experts
    dense = table.local(layout.tensor, layout.expert_tensor, NO_EXPERTS if is_separate else ALL_PARAMETERS)
    experts = table.local(layout.tensor, layout.expert_tensor, layout.expert) if is_separate else None
    stages = []
    for pipeline, stage in enumerate(held):
        chunks = _chunks(dense, ranges, pipeline, table.copies)
        ranks = layout.data * layout.context
        dense_share = _fullest_share(stage.dense, dense, chunks, ranks, rule, high_bandwidth)
        expert_share = stage.experts
        if experts is not None:
            chunks = _chunks(experts, ranges, pipeline, 0)
            expert_share = _fullest_share(stage.experts, experts, chunks, layout.expert_data, rule, high_bandwidth)
        stages.append(StageHolding(dense_share, expert_share))
    return tuple(stages)


def _chunks(local: LocalColumns, ranges: Sequence[Sequence[range]], pipeline: int, copies: int) -> Iterator[Numbers]:
    """Yield the numbers of the parameters of each model chunk of a pipeline rank."""
    is_last = pipeline == len(ranges) - 1
    for stage, span in enumerate(ranges[pipeline]):
        chosen = (local.place >= span.start) & (local.place < span.stop)
        if pipeline == 0 and stage == 0:
            chosen |= local.place == BEFORE_LAYERS
        more = np.zeros(0, dtype=np.int64)
        if is_last and stage == len(ranges[pipeline]) - 1:
            chosen |= local.place == AFTER_LAYERS
            more = np.tile(np.flatnonzero(local.is_embedding), copies if pipeline else 0)
        yield np.concatenate([np.flatnonzero(chosen), more])


def _fullest_share(
    holding: Holding, local: LocalColumns, chunks: Iterable[Numbers], ranks: int, rule: LayerWise, high_bandwidth: bool
) -> Holding:
    """Replace the state of all ranks together by the state of the fullest rank.

    `chunks`: the parameters of each model chunk, as their numbers in `local`.
    """
    if not holding.elements:
        return holding
    stored = holding.shared_stored + holding.whole_stored
    holding = replace(holding, shared_state=0, shared_stored=stored, whole_stored=0)
    if rule is LayerWise.DEALT:
        every = local.select(np.concatenate(list(chunks)))
        state = np.bincount(deal(every.elements, every.is_matrix, ranks), weights=every.state, minlength=ranks)
        return replace(holding, whole_state=int(np.max(state)))
    kept = np.zeros(ranks)
    others = 0
    elements = 0
    for chunk in map(local.select, chunks):
        matrices = chunk.select(chunk.is_matrix)
        rest = chunk.select(~chunk.is_matrix)
        packing = pack(matrices.rows, matrices.columns, ranks, rule, high_bandwidth=high_bandwidth)
        kept += np.bincount(packing.shard_of, weights=matrices.state, minlength=ranks)
        ends = int((-(-rest.elements // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT).sum())
        padded = align(ends, bucket_alignment(ranks, high_bandwidth))
        others += ceil(int(np.sum(rest.state)) * padded / max(int(np.sum(rest.elements)), 1) / ranks)
        elements += packing.shard_size * ranks + padded
    return replace(holding, aligned=elements, whole_state=int(np.max(kept)) + others)
