"""Recovery of a group's layout: proposals by witnesses, constrained by sizes, confirmed by content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mcore_ckpt_ext.errors import LayoutError
from mcore_ckpt_ext.layout.buckets import BucketKey, Bytes, GroupLayout, OptimizerGroup, Placement, misfit
from mcore_ckpt_ext.layout.discovery import discover
from mcore_ckpt_ext.layout.grad_buffer import BufferParameter, PackingRule, bucket_alignment, pack
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.parameter_order import WORD_EMBEDDINGS, ParameterOrder, registration_order
from mcore_ckpt_ext.layout.proof import first_mismatch
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.model_space.slices import numel_of

_SAMPLE = 64


@dataclass(frozen=True)
class Proposal:
    """A witness's answer to where the parameters of a group lie; None where it does not know."""

    label: str
    layout_of: Callable[[OptimizerGroup], GroupLayout | None]


@dataclass(frozen=True)
class RecoveredLayout:
    """A layout that sizes, chunk borders and samples of the content confirm, and the witness it came from."""

    witness: str
    layout: GroupLayout
    discovered: bool = False


def recover(
    group: OptimizerGroup, models: LocalModels, proposals: Sequence[Proposal], read: Bytes
) -> RecoveredLayout:
    """Find the layout of one optimizer group.

    Samples of every parameter confirm the choice here; the proof over all elements is made where they are moved.

    Raises:
        LayoutError: no proposal holds, and discovery does not find one either.
    """
    tried: list[str] = []
    for proposal in proposals:
        layout = proposal.layout_of(group)
        problem = "it does not know every parameter" if layout is None else misfit(layout, group)
        if layout is not None and problem is None:
            problem = _sample(group, layout, read)
        if layout is not None and problem is None:
            return RecoveredLayout(proposal.label, layout)
        tried.append(f"{proposal.label}: {problem}")
    try:
        found = discover(group, models.candidates(group.rank), _data_parallel_borders(group, models), read)
    except LayoutError as error:
        raise LayoutError(
            "no layout of the gradient buffers could be proven",
            found="; ".join([*tried, f"by content: {error}"]),
            where=str(group),
        ) from error
    return RecoveredLayout("discovery by content", found, discovered=True)


def by_order(models: LocalModels, order: ParameterOrder, rule: PackingRule = PackingRule.SINCE_0_13) -> Proposal:
    """The layout that a packing rule gives for one parameter order."""
    return Proposal(order.label, lambda group: _packed(models, order, rule, group))


def by_sidecar(models: LocalModels, sidecar: Sidecar) -> Proposal:
    """The layout that was recorded when the checkpoint was written."""

    def layout_of(group: OptimizerGroup) -> GroupLayout | None:
        recorded = [g for g in sidecar.groups if g.child == group.child and group.index in g.indices]
        layout: dict[BucketKey, list[Placement]] = {}
        origins: dict[int, int] = {}
        for bucket in recorded[0].buckets if recorded else ():
            number = 0 if group.joined else bucket.bucket
            placements = layout.setdefault(BucketKey(bucket.buffer, bucket.dtypes, number), [])
            origin = origins.get(bucket.buffer, 0) if group.joined else 0
            origins[bucket.buffer] = origin + bucket.numel_unpadded
            for parameter in bucket.parameters:
                known = parameter.name in models.weights
                regions = models.regions(parameter.name, group.rank.tensor) if known else None
                if regions is None or numel_of(regions) != parameter.stop - parameter.start:
                    return None
                placements.append(Placement(parameter.name, regions, origin + parameter.start))
        return layout or None

    return Proposal("the sidecar", layout_of)


def _sample(group: OptimizerGroup, layout: GroupLayout, read: Bytes) -> str | None:
    """Compare the first elements of every parameter with its weight; what differs, in words."""
    for key, placements in layout.items():
        for placement in placements:
            count = min(_SAMPLE, numel_of(placement.regions))
            master = read.master(group, key, placement.start, count)
            mismatch = first_mismatch(master, read.weight(placement.regions, 0, count))
            if mismatch is not None:
                return f"{placement.name} would be {mismatch}"
    return None


def _packed(
    models: LocalModels, order: ParameterOrder, rule: PackingRule, group: OptimizerGroup
) -> GroupLayout | None:
    names = models.names(group.rank)
    if names is None:
        return None
    layout: dict[BucketKey, list[Placement]] = {}
    buffer = 0
    for stage in group.stages:
        last = (group.rank.pipeline, stage) == (models.layout.pipeline - 1, models.layout.virtual_pipeline - 1)
        tied_copy = last and models.has_tied_copy and group.rank.expert is None
        registered = registration_order(names[stage], order, tied_copy)
        if registered is None:
            return None
        # One buffer for each (parameter, gradient) dtype, in order of first use (param_and_grad_buffer.py).
        for dtype in dict.fromkeys(models.weights[name].tensor.dtype for name in registered):
            chosen = [name for name in registered if models.weights[name].tensor.dtype == dtype]
            buckets = _pack_buffer(models, group, stage, chosen, rule)
            if buckets is None:
                return None
            dtypes = f"(torch.{dtype}, torch.{_gradient_dtype(models, dtype)})"
            layout.update({BucketKey(buffer, dtypes, number): placed for number, placed in enumerate(buckets)})
            buffer += 1
    return layout


def _pack_buffer(
    models: LocalModels, group: OptimizerGroup, stage: int, names: Sequence[str], rule: PackingRule
) -> list[list[Placement]] | None:
    """The placements of one buffer, a list for each bucket; one list for all where the format joins them."""
    regions = [models.regions(name, group.rank.tensor) for name in names]
    known = [region for region in regions if region is not None]
    if len(known) != len(names):
        return None
    # `shared_embedding` marks the word embeddings of tied models with several pipeline stages
    # (language_module.py, `setup_embeddings_and_output_layer`).
    parameters = [
        BufferParameter(numel_of(region), models.has_tied_copy and name == WORD_EMBEDDINGS)
        for name, region in zip(names, known, strict=True)
    ]
    buckets = pack(
        parameters,
        bucket_size=_bucket_size(models, group, stage),
        data_parallel=_buffer_ranks(models, group),
        rule=rule,
        high_bandwidth=bool(models.arguments.get("ddp_pad_buckets_for_high_nccl_busbw")),
    )
    origins = [0, *accumulate(bucket.numel_unpadded for bucket in buckets)] if group.joined else [0] * len(buckets)
    placed = [
        [Placement(names[index], known[index], origin + start) for index, start, _ in bucket.placements]
        for origin, bucket in zip(origins, buckets, strict=False)
    ]
    return [[placement for bucket in placed for placement in bucket]] if group.joined else placed


def _gradient_dtype(models: LocalModels, dtype: str) -> str:
    return "float32" if models.arguments.get("accumulate_allreduce_grads_in_fp32") else dtype


def _buffer_ranks(models: LocalModels, group: OptimizerGroup) -> int:
    """Ranks that share a buffer, within one distributed-optimizer instance.

    For the dense buffers data times context parallel; for experts what expert parallelism leaves of the world
    (megatron/core/parallel_state.py, expert data parallel).
    """
    instances = int(models.arguments.get("num_distributed_optimizer_instances") or 1)
    layout = models.layout
    ranks = layout.data * layout.context
    if group.rank.expert is not None:
        ranks = layout.world // (layout.expert * layout.expert_tensor * layout.pipeline)
    return max(1, ranks // instances)


def _bucket_size(models: LocalModels, group: OptimizerGroup, stage: int) -> int | None:
    """Elements after which a bucket is closed; None for one bucket (distributed_data_parallel.py, core_v0.12 to 0.19).

    Only the first chunk of the first stage is cut, and only when gradients are reduced during the backward pass.
    The default and `--ddp-num-buckets`: megatron/training/training.py, `get_model`.
    """
    arguments = models.arguments
    if (
        not arguments.get("overlap_grad_reduce")
        or group.rank.pipeline > 0
        or stage > 0
        or arguments.get("overlap_param_gather_with_optimizer_step")
    ):
        return None
    if arguments.get("ddp_num_buckets"):
        held = models.chunks[group.rank.pipeline] if models.chunks else []
        total = sum(numel_of(models.regions(name, group.rank.tensor) or ()) for chunk in held for name in chunk)
        return max(1, total // int(arguments["ddp_num_buckets"]))
    if arguments.get("ddp_bucket_size"):
        return int(arguments["ddp_bucket_size"])
    return max(40_000_000, 1_000_000 * models.layout.data * models.layout.context)


def _data_parallel_borders(group: OptimizerGroup, models: LocalModels) -> dict[BucketKey, frozenset[int]]:
    """The cuts of each bucket that its even division between the data-parallel ranks makes."""
    ranks = _buffer_ranks(models, group)
    high_bandwidth = bool(models.arguments.get("ddp_pad_buckets_for_high_nccl_busbw"))
    alignment = bucket_alignment(ranks, high_bandwidth)
    borders: dict[BucketKey, frozenset[int]] = {}
    for key, stored in group.buckets.items():
        padded = -(-stored.numel_unpadded // alignment) * alignment
        borders[key] = frozenset(padded // ranks * rank for rank in range(1, ranks))
    return borders
