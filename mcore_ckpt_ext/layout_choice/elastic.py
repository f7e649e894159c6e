"""Chooses the layout of a job that goes on with another number of GPUs: no I/O.

Training must not notice: sequences, the context parallel size and the global batch stay, so data-parallel sizes divide
the global batch and every step of its ramp. GPUs that no such layout uses wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import prod

from mcore_ckpt_ext.continuity.batch_sizes import batch_divisor
from mcore_ckpt_ext.errors import format_bytes, quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.choice import Choice, batch_of
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout, SearchRequest
from mcore_ckpt_ext.layout_choice.memory import Buffers, Sharding
from mcore_ckpt_ext.layout_choice.model_table import ModelTable
from mcore_ckpt_ext.layout_choice.order import distance, idle_steps, keeps_rows, leaves_node, usage_key
from mcore_ckpt_ext.layout_choice.padded_rows import PaddedRows
from mcore_ckpt_ext.layout_choice.rules import RULES, violations
from mcore_ckpt_ext.layout_choice.search import Search, first_of_search, search, with_batch
from mcore_ckpt_ext.versions import Version

# Layouts of equal rank whose memory is estimated: a choice among 16,384 GPUs takes less than a second.
_MOST_EVALUATED = 24
_MOST_DATA_SIZES = 3


@dataclass
class ElasticResult:
    """The layout with which a job goes on, or why there is none.

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
    micro_batch, global_batch = batch_of(job)
    share = micro_batch * layout.data
    # None of the rules depends on parameters.
    empty = ModelTable((), job.num_layers or 0, copies=0, padded_rows=PaddedRows(None, 0, 1))
    choice = Choice(job, empty, layout, None, micro_batch, global_batch or share, version)
    depending = (
        "world size",
        "expert world size",
        "rank order",
        "optimizer instances",
        "batch sizes",
        "evaluation batch",
    )
    rules = [rule for rule in RULES if rule[0] in depending]
    may_decrease = bool(job.raw.get("decrease_batch_size_if_needed"))
    for _, reason in violations(choice, rules):
        if not (may_decrease and reason.startswith("global batch")):
            return layout, reason
    if batch_divisor(job) % share and not may_decrease:
        return layout, f"a step of the batch size's ramp is not a multiple of micro batch x DP = {share}"
    return layout, None


def choose(
    job: JobArguments,
    table: ModelTable,
    old: ParallelLayout,
    request: SearchRequest,
    buffers: Buffers,
    *,
    may_change_batch: bool,
) -> ElasticResult:
    """Choose the layout of a job that goes on.

    Args:
        job: arguments of the model and of the job.
        table: the model's parameters.
        old: the layout of the job's own arguments.
        request: the GPUs that the job has now.
        buffers: how the job stores gradients and optimizer.
        may_change_batch: whether the global batch may change if this uses more GPUs.

    Returns:
        The job's own layout if it fits the GPUs; otherwise the layout that `search` lists first for the number of GPUs
        whose time `usage_key` finds best used.
    """
    elastic = _ElasticSearch(job, table, old, request, buffers, may_change_batch)
    job_layout, reason = own_layout(job, request.gpus, request.version)
    if reason is None and (accepted := elastic.pinned_search(job_layout).found):
        return ElasticResult(accepted[0])
    usual = next((candidate.memory.total for candidate in elastic.pinned_search(old).found), None)
    memory = max(request.memory, usual or 0) if request.memory is not None else usual
    limited = replace(request, memory=memory, is_least=request.memory is None, pins={"context": old.context})
    best = elastic.best_used(limited)
    if best is None and limited.is_least and memory is not None:
        limited = replace(limited, memory=None)
        best = elastic.best_used(limited)
    if best is not None:
        first = first_of_search(job, table, old, replace(limited, gpus=best.choice.layout.world), buffers)
        is_within = first is not None and not limited.exceeds(first.memory.total)
        elastic.result.chosen = first if first and is_within and elastic.refusal(first.choice.layout) is None else best
    return elastic.result


@dataclass
class _ElasticSearch:
    """A search among numbers of GPUs for one job; for the attributes see `choose`.

    The result learns why layouts are refused.
    """

    job: JobArguments
    table: ModelTable
    old: ParallelLayout
    request: SearchRequest
    buffers: Buffers
    may_change_batch: bool
    result: ElasticResult = field(default_factory=ElasticResult)

    def pinned_search(self, layout: ParallelLayout) -> Search:
        """Search with all sizes fixed."""
        request = replace(self.request, gpus=layout.world, memory=None, pins=layout.model_sizes())
        return search(self.job, self.table, self.old, request, self.buffers)

    def best_used(self, limited: SearchRequest) -> FoundLayout | None:
        """Return the first layout by `usage_key` that is within the limit of memory.

        Candidates come in a rough order; layouts are compared exactly while they are as near and idle as little.
        """
        best: list[FoundLayout] = []
        group: object = None
        for key, layout in self._candidates():
            if best and (key[:2] != group or len(best) == _MOST_EVALUATED):
                break
            if limited.exceeds(self._least_memory(layout)):
                continue
            if reason := self.refusal(layout):
                self.result.reasons.append((str(layout), reason))
                continue
            group = key[:2]
            best += self._accepted_layouts(layout, limited)
        return min(best, key=lambda candidate: usage_key(candidate, self.old, limited), default=None)

    def refusal(self, layout: ParallelLayout) -> str | None:
        """Return why Megatron refuses a layout, or how training would change; None if neither.

        The layers are not divided yet, so the rule about them does not count.
        """
        choice = with_batch(Choice(self.job, self.table, layout, None, 1, 1, self.request.version))
        for name, reason in violations(choice):
            if name != "layers per stage":
                return reason
        global_batch = batch_of(self.job)[1]
        if not choice.keeps_global_batch and not self.may_change_batch:
            return f"the global batch {global_batch} cannot be kept"
        if not keeps_rows(choice):
            rows = quantity(self.table.padded_rows.stored, "row")
            return f"TP{layout.tensor} does not divide the {rows} of the vocabulary"
        return None

    def _accepted_layouts(self, layout: ParallelLayout, limited: SearchRequest) -> Iterator[FoundLayout]:
        """Yield the layouts with these sizes that are within the limit of memory."""
        searched = self.pinned_search(layout)
        self.result.reasons += [(str(exclusion.layout), exclusion.reason) for exclusion in searched.nearest.values()]
        for candidate in searched.found:
            needed = candidate.memory.total
            if not limited.exceeds(needed):
                yield candidate
                continue
            self.result.least_memory = min(needed, self.result.least_memory or needed)
            self.result.reasons.append((str(candidate.choice.layout), f"a GPU would need {format_bytes(needed)}"))

    def _least_memory(self, layout: ParallelLayout) -> int:
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

    def _candidates(self) -> list[tuple[tuple[float, ...], ParallelLayout]]:
        """Return layouts to try with their keys, roughly in the order of `usage_key`."""
        old = self.old
        node = self.request.gpus_per_node
        tensors = sorted({old.tensor, *(size for size in range(1, node + 1) if node % size == 0)})
        candidates = []
        for tensor in tensors:
            for pipeline in range(1, (self.job.num_layers or 1) + 3):
                ranks = tensor * pipeline * old.context
                if ranks > self.request.gpus:
                    break
                for data in self._data_sizes(self.request.gpus // ranks):
                    layout = replace(
                        old, tensor=tensor, pipeline=pipeline, data=data, world=ranks * data, virtual_pipeline=1,
                        expert=1, expert_tensor=tensor,
                    )  # fmt: skip
                    most = old.virtual_pipeline if pipeline > 1 else 1
                    for with_experts in self._with_experts(layout):
                        staged = (replace(with_experts, virtual_pipeline=stages) for stages in range(1, most + 1))
                        candidates += [(self._rough_key(candidate), candidate) for candidate in staged]
        return sorted(candidates, key=lambda candidate: candidate[0])

    def _data_sizes(self, most: int) -> Sequence[int]:
        """Return the largest data-parallel sizes up to `most` that the batch allows."""
        divisor = batch_divisor(self.job)
        if not divisor:
            return [most]
        sizes = list(islice((size for size in range(most, 0, -1) if divisor % size == 0), _MOST_DATA_SIZES))
        return sizes if not self.may_change_batch or most in sizes else [most, *sizes]

    def _with_experts(self, layout: ParallelLayout) -> Iterator[ParallelLayout]:
        """Yield a layout with every way of dividing the experts among its ranks."""
        yield layout
        experts = self.job.num_experts or 0
        for expert in (size for size in range(2, min(experts, layout.world) + 1) if experts % size == 0):
            for expert_tensor in {1, layout.tensor, self.old.expert_tensor}:
                if layout.world % (expert * expert_tensor * layout.pipeline) == 0:
                    yield replace(layout, expert=expert, expert_tensor=expert_tensor)

    def _rough_key(self, layout: ParallelLayout) -> tuple[float, ...]:
        """Return a sort key like `usage_key`, without the division of the layers and without memory."""
        layers = self.job.num_layers or 1
        micro_batch, global_batch = batch_of(self.job)
        share = (global_batch or micro_batch * layout.data * layout.pipeline) // layout.data
        fitting = next((size for size in range(min(micro_batch, share), 0, -1) if share % size == 0), 1)
        work = layout.virtual_pipeline * max(share // fitting, 1)
        balance = layers / (layout.pipeline * -(-layers // layout.pipeline))
        keeps_sizes = layout.model_sizes() == self.old.model_sizes()
        used = 1.0 if keeps_sizes else balance * work / (work + layout.pipeline - 1)
        idle = 1 - layout.world / self.request.gpus * used
        is_outside = leaves_node(layout, self.old, self.request.gpus_per_node)
        return is_outside, idle_steps(idle), not keeps_sizes, distance(layout, self.old), idle
