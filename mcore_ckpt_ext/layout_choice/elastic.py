"""Chooses the layout of a job that goes on with another number of GPUs: no I/O.

Training must not notice: sequences, the context parallel size and the global batch stay, so data-parallel sizes divide
the global batch and every step of its ramp. GPUs that no such layout uses wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import gcd, prod

from mcore_ckpt_ext.continuity.batch_sizes import ramp_divisor
from mcore_ckpt_ext.errors import counted, format_bytes
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.choice import Choice, batch_of
from mcore_ckpt_ext.layout_choice.memory import Buffers, Sharding
from mcore_ckpt_ext.layout_choice.model_table import ModelTable
from mcore_ckpt_ext.layout_choice.options import Recomputation
from mcore_ckpt_ext.layout_choice.order import IDLE_STEP, distance, idle_fraction, keeps_rows, leaves_node, pressure
from mcore_ckpt_ext.layout_choice.padded_rows import PaddedRows
from mcore_ckpt_ext.layout_choice.rules import RULES, violations
from mcore_ckpt_ext.layout_choice.search import (
    FoundLayout,
    Search,
    SearchRequest,
    first_of_search,
    search,
    with_batch,
)
from mcore_ckpt_ext.versions import Version

# Layouts of equal rank that are weighed: a choice among 16,384 GPUs take less than a second.
_MOST_WEIGHED = 24
_MOST_DATA_SIZES = 3


@dataclass(frozen=True)
class ElasticRequest:
    """The GPUs that a job has now.

    Attributes:
        gpus: their number.
        gpus_per_node: GPUs of a node.
        version: the Megatron release that runs.
        memory: bytes of a GPU; None if unknown.
        may_change_batch: whether the global batch may change if this uses more GPUs.
    """

    gpus: int
    gpus_per_node: int
    version: Version
    memory: int | None = None
    recomputation: Recomputation = Recomputation.SELECTIVE
    may_change_batch: bool = False


@dataclass
class ElasticChoice:
    """The result of a choice.

    Attributes:
        chosen: the layout; None if there is none.
        reasons: why layouts were refused, the nearest to the old one first: (layout, reason).
        least_memory: bytes of a GPU that the smallest refused layout needs, if only memory is lacking.
    """

    chosen: FoundLayout | None = None
    reasons: list[tuple[str, str]] = field(default_factory=list)
    least_memory: int | None = None


def own_layout(job: JobArguments, gpus: int, version: Version) -> tuple[ParallelLayout, str | None]:
    """Return the layout of a job's own arguments on a number of GPUs, and why it is refused, or None.

    Only what depends on the number of GPUs is checked: sizes that divide it, and the batch.
    """
    stated = ParallelLayout.from_arguments(job.replace(world_size=None, data_parallel_size=None))
    layout = replace(stated, world=gpus, data=max(gpus // (stated.tensor * stated.pipeline * stated.context), 1))
    micro, whole = batch_of(job)
    empty = ModelTable((), job.num_layers or 0, copies=0, padded_rows=PaddedRows(None, 0, 1))
    choice = Choice(job, empty, layout, None, micro, whole or micro * layout.data, version)
    depending = ("world size", "expert world size", "rank order", "optimizer instances", "batch sizes")
    rules = [rule for rule in RULES if rule[0] in depending]
    may_decrease = bool(job.raw.get("decrease_batch_size_if_needed"))
    reason = next((reason for _, reason in violations(choice, rules)), None)
    if reason is not None and not (may_decrease and reason.startswith("global batch")):
        return layout, reason
    share = micro * layout.data
    if ramp_divisor(job) % share and not may_decrease:
        return layout, f"a step of the batch size's ramp is not a multiple of micro batch x DP = {share}"
    return layout, None


def choose(
    job: JobArguments, table: ModelTable, old: ParallelLayout, request: ElasticRequest, buffers: Buffers
) -> ElasticChoice:
    """Choose the layout of a job that goes on.

    Args:
        job: arguments of the model and of the job.
        table: the model's parameters.
        old: the layout of the job's own arguments.
        request: the GPUs.
        buffers: how the job stores gradients and optimizer.

    Returns:
        The job's own layout if it fits the GPUs; otherwise the layout that `search` lists first for the number of GPUs
        whose time `use_key` finds best used.
    """
    result = ElasticChoice()
    scales = _Scales(job, table, old, request, buffers)
    job_layout, reason = own_layout(job, request.gpus, request.version)
    if reason is None:
        result.chosen = next(iter(scales.weighed(job_layout).found), None)
        if result.chosen is not None:
            return result
    usual = next((candidate.memory.total for candidate in scales.weighed(old).found), None)
    memory = max(request.memory, usual or 0) if request.memory is not None else usual
    layouts = SearchRequest(
        request.gpus,
        request.gpus_per_node,
        request.version,
        memory,
        is_least=request.memory is None,
        recomputation=request.recomputation,
        pins={"context": old.context},
    )
    best = _most_used(scales, layouts, result)
    if best is None and request.memory is None and memory is not None:
        layouts = replace(layouts, memory=None)
        best = _most_used(scales, layouts, result)
    if best is not None:
        gpus = best.choice.layout.world
        first = first_of_search(job, table, old, replace(layouts, gpus=gpus), buffers)
        is_kept = first is not None and not layouts.exceeds(first.memory.total)
        result.chosen = first if first and is_kept and scales.refusal(first.choice.layout) is None else best
    return result


def _most_used(scales: _Scales, layouts: SearchRequest, result: ElasticChoice) -> FoundLayout | None:
    """Return the first layout by `use_key` that is within the limit of memory."""
    job = scales.job
    old = scales.old
    request = scales.request
    best: list[FoundLayout] = []
    group: object = None
    for order, layout in _candidates(job, old, request):
        if best and (order[:2] != group or len(best) == _MOST_WEIGHED):
            break
        if layouts.exceeds(scales.least_memory(layout)):
            continue
        if reason := scales.refusal(layout):
            result.reasons.append((str(layout), reason))
            continue
        group = order[:2]
        best += _accepted(scales.weighed(layout), layouts, result)
    return min(best, key=lambda candidate: use_key(candidate, old, layouts), default=None)


def use_key(one: FoundLayout, old: ParallelLayout, request: SearchRequest) -> tuple[object, ...]:
    """Return a sort key of layouts for different numbers of GPUs, best first.

    TP and EP within a node, or no larger than before; most of the GPUs' time used, by steps of 5 %; the global batch
    kept; the old model-parallel sizes with other data-parallel ranks; least memory pressure; the old form of stages;
    least idle. With the old sizes, the bubble counts as used: the job was meant to have it.

    Args:
        one: the layout.
        old: the layout of the job's own arguments.
        request: all GPUs.
    """
    layout = one.choice.layout
    keeps_sizes = layout.model_sizes() == old.model_sizes()
    idle = 1 - layout.world / request.gpus if keeps_sizes else idle_share(one, request.gpus)
    return (
        leaves_node(layout, old, request.gpus_per_node),
        int(idle / IDLE_STEP),
        not one.choice.keeps_global_batch,
        not keeps_sizes,
        pressure(one.memory.total, request.room),
        one.changes,
        idle,
    )


def idle_share(one: FoundLayout, gpus: int) -> float:
    """Return the unused share of all GPUs' time: by waiting, bubbles, and uneven stages."""
    return 1 - one.choice.layout.world / gpus * (1 - idle_fraction(one.choice))


@dataclass
class _Scales:
    """Weighs layouts of one job; for the attributes see `choose`."""

    job: JobArguments
    table: ModelTable
    old: ParallelLayout
    request: ElasticRequest
    buffers: Buffers

    def weighed(self, layout: ParallelLayout) -> Search:
        """Search with all sizes fixed."""
        request = self.request
        fixed = SearchRequest(
            layout.world,
            request.gpus_per_node,
            request.version,
            recomputation=request.recomputation,
            pins=layout.model_sizes(),
        )
        return search(self.job, self.table, self.old, fixed, self.buffers)

    def refusal(self, layout: ParallelLayout) -> str | None:
        """Return why Megatron refuses a layout, or how training would change; None if neither."""
        job = self.job
        rows = self.table.padded_rows
        choice = with_batch(Choice(job, self.table, layout, None, 1, 1, self.request.version))
        for name, reason in violations(choice):
            if name != "layers per stage":
                return reason
        whole = batch_of(job)[1] or choice.global_batch
        if choice.global_batch != whole and not self.request.may_change_batch:
            return f"the global batch {whole} cannot be kept"
        if not keeps_rows(choice):
            return f"TP{layout.tensor} does not divide the {counted(rows.stored, 'row')} of the vocabulary"
        return None

    def least_memory(self, layout: ParallelLayout) -> int:
        """Return a number of bytes that some GPU needs for weights and gradients alone."""
        if self.buffers.sharding is not Sharding.OPTIMIZER:
            return 0
        dense, experts = self._weights_and_gradients
        if layout.expert == 1:
            return (dense + experts) // (layout.tensor * layout.pipeline)
        return (dense // layout.tensor + experts // (layout.expert_tensor * layout.expert)) // layout.pipeline

    @cached_property
    def _weights_and_gradients(self) -> tuple[int, int]:
        """Bytes outside experts, and of experts."""
        totals = [0, 0]
        for parameter in self.table.parameters:
            width = parameter.weight_bytes + self.buffers.gradient_bytes * parameter.is_trained
            totals[parameter.expert is not None] += prod(parameter.shape) * width
        return totals[0], totals[1]


def _accepted(outcome: Search, request: SearchRequest, result: ElasticChoice) -> Iterator[FoundLayout]:
    """Yield the layouts that fit; the result learns why others do not."""
    result.reasons += [(str(layout), reason) for _, layout, reason in outcome.nearest.values()]
    for candidate in outcome.found:
        needed = candidate.memory.total
        if not request.exceeds(needed):
            yield candidate
            continue
        result.least_memory = min(needed, result.least_memory or needed)
        result.reasons.append((str(candidate.choice.layout), f"a GPU would need {format_bytes(needed)}"))


def _candidates(
    job: JobArguments, old: ParallelLayout, request: ElasticRequest
) -> list[tuple[tuple[float, ...], ParallelLayout]]:
    """Return layouts to try with their keys, roughly in the order of `use_key`."""
    layers = job.num_layers or 1
    node = request.gpus_per_node
    tensors = sorted({old.tensor, *(size for size in range(1, node + 1) if node % size == 0)})
    candidates = []
    for tensor in tensors:
        for pipeline in range(1, layers + 3):
            ranks = tensor * pipeline * old.context
            if ranks > request.gpus:
                break
            for data in _data_sizes(job, request, request.gpus // ranks):
                layout = replace(
                    old, tensor=tensor, pipeline=pipeline, data=data, world=ranks * data, virtual_pipeline=1,
                    expert=1, expert_tensor=tensor,
                )  # fmt: skip
                for parallel in _with_experts(layout, old, job):
                    most = old.virtual_pipeline if pipeline > 1 else 1
                    staged = (replace(parallel, virtual_pipeline=chunks) for chunks in range(1, most + 1))
                    candidates += [_ranked(staged_layout, job, old, request) for staged_layout in staged]
    return sorted(candidates, key=lambda candidate: candidate[0])


def _data_sizes(job: JobArguments, request: ElasticRequest, most: int) -> Sequence[int]:
    """Return the largest data-parallel sizes up to `most` that the batch allows."""
    whole = batch_of(job)[1]
    if whole is None:
        return [most]
    step = gcd(whole, ramp_divisor(job))
    sizes = list(islice((size for size in range(most, 0, -1) if step % size == 0), _MOST_DATA_SIZES))
    return sizes if not request.may_change_batch or most in sizes else [most, *sizes]


def _with_experts(layout: ParallelLayout, old: ParallelLayout, job: JobArguments) -> Iterator[ParallelLayout]:
    """Yield a layout with every way of dividing the experts among its ranks."""
    yield layout
    experts = job.num_experts or 0
    for expert in (size for size in range(2, min(experts, layout.world) + 1) if experts % size == 0):
        for expert_tensor in {1, layout.tensor, old.expert_tensor}:
            if layout.world % (expert * expert_tensor * layout.pipeline) == 0:
                yield replace(layout, expert=expert, expert_tensor=expert_tensor)


def _ranked(
    layout: ParallelLayout, job: JobArguments, old: ParallelLayout, request: ElasticRequest
) -> tuple[tuple[float, ...], ParallelLayout]:
    """Return a layout with a key like `use_key`, without its stages and its memory."""
    layers = job.num_layers or 1
    micro, whole = batch_of(job)
    share = (whole or micro * layout.data * layout.pipeline) // layout.data
    batches = max(share // next((size for size in range(min(micro, share), 0, -1) if share % size == 0), 1), 1)
    work = layout.virtual_pipeline * batches
    balance = layers / (layout.pipeline * -(-layers // layout.pipeline))
    keeps_sizes = layout.model_sizes() == old.model_sizes()
    used = 1.0 if keeps_sizes else balance * work / (work + layout.pipeline - 1)
    idle = 1 - layout.world / request.gpus * used
    key = (
        leaves_node(layout, old, request.gpus_per_node), int(idle / IDLE_STEP), not keeps_sizes,
        distance(layout, old), idle,
    )  # fmt: skip
    return key, layout
