"""Proposed packings of gradient buffers: by packing rules and parameter orders, or by the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mcore_ckpt_ext.layout.buckets import BucketKey, OptimizerGroup, Packing, Placement
from mcore_ckpt_ext.layout.grad_buffer import Bucket, BufferParameter, PackingRule, default_bucket_size, pack
from mcore_ckpt_ext.layout.local_model import LocalModels, ModelRank
from mcore_ckpt_ext.layout.parameter_order import ObservedOrder, ParameterOrder, registration_order
from mcore_ckpt_ext.layout.quantized import QUANTIZED, is_quantized
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.model_space.slices import Region, numel_of


@dataclass(frozen=True)
class Proposal:
    """A packing for each group, from one source of the order.

    Attributes:
        label: the name of the source in messages.
        packing_of: returns the packing of a group; None if the source lacks some parameter.
        is_observed: whether it was recorded, or observed in a model; otherwise it is the order of a known layer spec.
        is_recorded: whether the sidecar recorded it.
    """

    label: str
    packing_of: Callable[[OptimizerGroup], Packing | None]
    is_observed: bool = False
    is_recorded: bool = False


def propose_by_order(models: LocalModels, order: ParameterOrder, rule: PackingRule) -> Proposal:
    """Return the packing that a rule derives from one parameter order."""
    is_observed = isinstance(order, ObservedOrder)
    return Proposal(order.label, lambda group: _pack(models, order, rule, group), is_observed)


def propose_by_sidecar(models: LocalModels, sidecar: Sidecar) -> Proposal:
    """Return the packing that was recorded when the checkpoint was written."""
    buckets = {(group.child, index): group.buckets for group in sidecar.groups for index in group.indices}

    def packing_of(group: OptimizerGroup) -> Packing | None:
        packing: dict[BucketKey, list[Placement]] = {}
        origins: dict[int, int] = {}
        for bucket in buckets.get((group.child, group.index), ()):
            number = 0 if group.joined else bucket.bucket
            placements = packing.setdefault(BucketKey(bucket.buffer, bucket.dtypes, number), [])
            origin = origins.get(bucket.buffer, 0) if group.joined else 0
            origins[bucket.buffer] = origin + bucket.numel_unpadded
            for parameter in bucket.parameters:
                is_weight = parameter.name in models.weights
                regions = models.regions(parameter.name, group.rank.tensor, group.rank.shard) if is_weight else None
                if regions is None or numel_of(regions) != parameter.stop - parameter.start:
                    return None
                placements.append(Placement(parameter.name, regions, origin + parameter.start))
        return packing or None

    return Proposal("the sidecar", packing_of, is_observed=True, is_recorded=True)


@dataclass(frozen=True)
class PackedBuffer:
    """One gradient buffer as the rules lay it out: its parameters in registration order, and its buckets."""

    dtypes: str
    names: Sequence[str]
    regions: Sequence[tuple[Region, ...]]
    buckets: Sequence[Bucket]

    def placement(self, index: int, start: int) -> Placement:
        """Return the placement at `start` of the parameter with that index in registration order."""
        return Placement(self.names[index], self.regions[index], start)

    def joined_origins(self) -> list[int]:
        """Return the start of each bucket if they are concatenated without the padding at their ends."""
        return [0, *accumulate(bucket.numel_unpadded for bucket in self.buckets)][:-1]


def pack_buffers(
    models: LocalModels, order: ParameterOrder, rule: PackingRule, rank: ModelRank, stages: Sequence[int]
) -> list[PackedBuffer] | None:
    """Return one optimizer's gradient buffers on a rank; None if the order or model's split is unknown."""
    names = models.names(rank)
    if names is None:
        return None
    packed: list[PackedBuffer] = []
    for stage in stages:
        tied_copy = (rank.pipeline, stage) == models.layout.last_chunk and models.has_tied_copy and rank.expert is None
        registered = registration_order(names[stage], order, tied_copy)
        if registered is None:
            return None
        # One buffer for each (parameter, gradient) dtype, in order of first use (param_and_grad_buffer.py).
        for dtype in dict.fromkeys(_buffer_dtype(models, name) for name in registered):
            chosen = [name for name in registered if _buffer_dtype(models, name) == dtype]
            buffer = _pack_buffer(models, rank, stage, chosen, rule)
            if buffer is None:
                return None
            packed.append(buffer)
    return packed


def _pack(models: LocalModels, order: ParameterOrder, rule: PackingRule, group: OptimizerGroup) -> Packing | None:
    buffers = pack_buffers(models, order, rule, group.rank, group.stages)
    if buffers is None:
        return None
    packing: dict[BucketKey, list[Placement]] = {}
    for number, buffer in enumerate(buffers):
        origins = buffer.joined_origins() if group.joined else [0] * len(buffer.buckets)
        for position, (origin, bucket) in enumerate(zip(origins, buffer.buckets, strict=True)):
            key = BucketKey(number, buffer.dtypes, 0 if group.joined else position)
            placed = [buffer.placement(index, origin + start) for index, start, _ in bucket.placements]
            packing.setdefault(key, []).extend(placed)
    return packing


def _pack_buffer(
    models: LocalModels, rank: ModelRank, stage: int, names: Sequence[str], rule: PackingRule
) -> PackedBuffer | None:
    regions = [models.regions(name, rank.tensor, rank.shard) for name in names]
    known_regions = [region for region in regions if region is not None]
    if len(known_regions) != len(names):
        return None
    parameters = [
        BufferParameter(numel_of(region), models.is_shared_embedding(name))
        for name, region in zip(names, known_regions, strict=True)
    ]
    buckets = pack(
        parameters,
        bucket_size=_bucket_size(models, rank, stage),
        data_parallel=buffer_ranks(models, rank),
        rule=rule,
        high_bandwidth=bool(models.arguments.ddp_pad_buckets_for_high_nccl_busbw),
    )
    stored = models.weights[names[0]].tensor.dtype
    gradient = "float32" if models.arguments.accumulate_allreduce_grads_in_fp32 else stored
    return PackedBuffer(f"(torch.{_buffer_dtype(models, names[0])}, torch.{gradient})", names, known_regions, buckets)


def _buffer_dtype(models: LocalModels, name: str) -> str:
    """Return a parameter's dtype in its buffer; checkpoints store quantized parameters dequantized."""
    return QUANTIZED if is_quantized(name, models.arguments) else models.weights[name].tensor.dtype


def buffer_ranks(models: LocalModels, rank: ModelRank) -> int:
    """Return the number of ranks that share a buffer, within one distributed-optimizer instance.

    Dense buffers are shared by data times context parallel ranks; buffers of experts by the expert data parallel ranks
    (megatron/core/parallel_state.py).
    """
    instances = models.arguments.num_distributed_optimizer_instances or 1
    layout = models.layout
    ranks = layout.data * layout.context if rank.expert is None else layout.expert_data
    return max(1, ranks // instances)


def _bucket_size(models: LocalModels, rank: ModelRank, stage: int) -> int | None:
    """Return the number of elements after which a bucket is closed, or None for a single bucket.

    Only the first chunk of the first stage is divided, and only if gradients are reduced during the backward pass
    (distributed_data_parallel.py, core_v0.12 to 0.19). `--ddp-num-buckets` is in megatron/training/training.py,
    `get_model`.
    """
    arguments = models.arguments
    if (
        not arguments.overlap_grad_reduce
        or rank.pipeline > 0
        or stage > 0
        or arguments.overlap_param_gather_with_optimizer_step
    ):
        return None
    if arguments.ddp_num_buckets:
        held = models.chunks[rank.pipeline] if models.chunks else []
        total = sum(numel_of(models.regions(name, rank.tensor, rank.shard) or ()) for chunk in held for name in chunk)
        return max(1, total // arguments.ddp_num_buckets)
    if arguments.ddp_bucket_size:
        return arguments.ddp_bucket_size
    return default_bucket_size(models.layout.data * models.layout.context)
