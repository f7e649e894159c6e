"""Finds the layouts of a number of GPUs that Megatron accepts for a model, sorted from best to worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import gcd

from mcore_ckpt_ext.continuity.batch_sizes import ramp_divisor
from mcore_ckpt_ext.continuity.mathematics import Difference, differences, is_same_training
from mcore_ckpt_ext.continuity.sizes import sizes_of
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.choice import Choice, batch_of
from mcore_ckpt_ext.layout_choice.combinations import Combinations
from mcore_ckpt_ext.layout_choice.layer_wise import layer_wise_stages
from mcore_ckpt_ext.layout_choice.memory import Buffers, Memory, bubble_fraction, memory_of
from mcore_ckpt_ext.layout_choice.model_table import ModelTable, StageHolding
from mcore_ckpt_ext.layout_choice.options import Recomputation
from mcore_ckpt_ext.layout_choice.order import (
    IDLE_STEP,
    MOST_OF_USUAL,
    ROOM,
    changes_of,
    continuity,
    distance,
    guidance,
    idle_fraction,
    keeps_rows,
    pressure,
)
from mcore_ckpt_ext.layout_choice.rules import (
    BATCH_RULES,
    DENSE_RULES,
    EXPERT_RULES,
    STAGE_RULES,
    NamedRule,
    violations,
)
from mcore_ckpt_ext.layout_choice.stage_activations import ActivationEstimate
from mcore_ckpt_ext.layout_choice.stage_split import StageSplit, stage_splits
from mcore_ckpt_ext.versions import Version


@dataclass(frozen=True)
class SearchRequest:
    """The hardware and the options of a layout search.

    Attributes:
        gpus_per_node: number of GPUs of a node; larger tensor parallel sizes cross nodes.
        version: the Megatron release that would run.
        memory: bytes of a GPU; None if unknown.
        is_least: whether `memory` is a lower bound, because a job ran in it.
        pins: fixed sizes, by their names in `ParallelLayout`.
    """

    gpus: int
    gpus_per_node: int
    version: Version
    memory: int | None = None
    is_least: bool = False
    recomputation: Recomputation = Recomputation.SELECTIVE
    pins: Mapping[str, int] = field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        """Bytes of a GPU; layouts that need more come after all others."""
        return round(self.memory * MOST_OF_USUAL) if self.memory is not None and self.is_least else self.memory

    def exceeds(self, needed: int) -> bool:
        """Return whether a number of bytes is beyond the limit."""
        return self.limit is not None and needed > self.limit

    @property
    def room(self) -> int | None:
        """Bytes that are free of the error of the estimate."""
        return self.memory if self.memory is None or self.is_least else round(self.memory * (1 - ROOM))


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """A layout that Megatron accepts.

    Attributes:
        choice: the layout with its batch.
        memory: the memory of the fullest GPU.
        fits: whether that is within a GPU's memory; None if unknown.
        bubble: the idle fraction of the pipeline, 0 to 1.
        keeps_batch: whether both batch sizes are unchanged, as far as they are known.
        changes: how much of the job's form changes; see `changes_of`.
        holdings: the totals on a rank of each pipeline stage.
        differences: all that training computes otherwise, apart from rounding.
    """

    choice: Choice
    memory: Memory
    fits: bool | None
    bubble: float
    keeps_batch: bool
    changes: int
    holdings: tuple[StageHolding, ...]
    differences: tuple[Difference, ...] = ()

    @property
    def keeps_mathematics(self) -> bool:
        """True if nothing differs but rounding and what is drawn by chance."""
        return is_same_training(self.differences)


@dataclass
class Search:
    """The result of a search.

    Attributes:
        found: the accepted layouts, best first.
        excluded: the number of layouts excluded by each rule; layouts that differ only in sizes that the rule does not
            depend on count as one.
        nearest: for each rule, the excluded layout nearest to the old one: (distance, layout, reason).
    """

    found: list[FoundLayout] = field(default_factory=list)
    excluded: Counter[str] = field(default_factory=Counter)
    nearest: dict[str, tuple[float, ParallelLayout, str]] = field(default_factory=dict)

    @property
    def refusal(self) -> tuple[ParallelLayout, str] | None:
        """The excluded layout that is nearest to the old one, and the reason; None if a layout is accepted."""
        if self.found:
            return None
        _, layout, reason = min(self.nearest.values(), key=lambda exclusion: exclusion[0])
        return layout, reason

    def exclude(self, rule: str, distance: float, layout: ParallelLayout, reason: str) -> None:
        """Count a layout that a rule excludes."""
        self.excluded[rule] += 1
        if rule not in self.nearest or distance < self.nearest[rule][0]:
            self.nearest[rule] = (distance, layout, reason)


def search(
    job: JobArguments, table: ModelTable, old: ParallelLayout, request: SearchRequest, buffers: Buffers
) -> Search:
    """Evaluate all combinations of sizes whose product is the number of GPUs.

    Args:
        job: arguments of the model.
        table: its parameters.
        old: the layout of the job that wrote the checkpoint.
        request: the hardware and the options.
        buffers: how the job stores gradients and optimizer.
    """
    evaluation = _Evaluation(job, table, old, request, buffers)
    result = evaluation.result
    result.found = [evaluation.weighed(*accepted) for accepted in evaluation.accepted()]
    result.found.sort(key=lambda layout: _rank(layout, old, request))
    return result


def first_of_search(
    job: JobArguments, table: ModelTable, old: ParallelLayout, request: SearchRequest, buffers: Buffers
) -> FoundLayout | None:
    """Return the first layout of `search`, without weighing all others; None if there is none.

    Layouts are weighed in the order of what does not depend on memory, until one of them is within the limit.
    """
    evaluation = _Evaluation(job, table, old, request, buffers)
    groups: dict[tuple[object, ...], list[tuple[Choice, StageSplit]]] = {}
    for choice, split in evaluation.accepted():
        key = (*_kept(choice, _differences(choice, old)), *_form(choice, old, request))
        groups.setdefault(key, []).append((choice, split))
    found: list[FoundLayout] = []
    for _, group in sorted(groups.items()):
        weighed = [evaluation.weighed(*accepted) for accepted in group]
        found += weighed
        if any(not request.exceeds(layout.memory.total) for layout in weighed):
            break
    return min(found, key=lambda layout: _rank(layout, old, request), default=None)


class _Evaluation:
    """Applies the rules to every combination of sizes, and weighs those that none excludes."""

    def __init__(
        self, job: JobArguments, table: ModelTable, old: ParallelLayout, request: SearchRequest, buffers: Buffers
    ) -> None:
        self._job = job
        self._table = table
        self._old = old
        self._request = request
        self._buffers = buffers
        self._estimate = ActivationEstimate(job, request.recomputation)
        self._split = cache(self._first_split)
        self._holdings = cache(self._held_by_stages)
        self.result = Search()

    def accepted(self) -> Iterator[tuple[Choice, StageSplit]]:
        """Yield all layouts in the order of their sizes; the result learns what excludes the others."""
        sizes = Combinations(self._job, self._old, self._request.gpus, self._request.pins)
        for dense in sizes.dense_layouts():
            if self._is_excluded(self._choice(dense), DENSE_RULES):
                continue
            for layout in sizes.expert_layouts(dense):
                if not self._is_excluded(self._choice(layout), EXPERT_RULES):
                    yield from self._accepted_stages(sizes.stage_layouts(layout))

    def _accepted_stages(self, layouts: Iterable[ParallelLayout]) -> Iterator[tuple[Choice, StageSplit]]:
        """Yield layouts that differ in their virtual stages."""
        for layout in layouts:
            split = self._split(layout.pipeline, layout.virtual_pipeline)
            choice = with_batch(self._choice(layout, split))
            if not self._is_excluded(choice, STAGE_RULES) and split is not None:
                yield choice, split

    def _choice(self, layout: ParallelLayout, split: StageSplit | None = None) -> Choice:
        return Choice(self._job, self._table, layout, split, 1, 1, self._request.version)

    def _is_excluded(self, choice: Choice, rules: Sequence[NamedRule]) -> bool:
        broken = next(violations(choice, rules), None)
        if broken is not None:
            rule, reason = broken
            self.result.exclude(rule, distance(choice.layout, self._old), choice.layout, reason)
        return broken is not None

    def _first_split(self, pipeline: int, virtual: int) -> StageSplit | None:
        predicted = self._job.mtp_num_layers or 0
        return next(stage_splits(self._job, pipeline, virtual, self._request.version, predicted), None)

    def _held_by_stages(
        self, split: StageSplit, tensor: int, expert_tensor: int, expert: int
    ) -> tuple[StageHolding, ...]:
        return tuple(self._table.stages(split.ranges, tensor, expert_tensor, expert))

    def _stages(self, split: StageSplit, layout: ParallelLayout) -> tuple[StageHolding, ...]:
        """Return what a GPU of each stage holds."""
        held = self._holdings(split, layout.tensor, layout.expert_tensor, layout.expert)
        buffers = self._buffers
        if buffers.layer_wise is None:
            return held
        return layer_wise_stages(
            self._table, split.ranges, layout, held, buffers.layer_wise, high_bandwidth=buffers.high_bandwidth
        )

    def weighed(self, choice: Choice, split: StageSplit) -> FoundLayout:
        """Estimate the memory of a layout."""
        held = self._stages(split, choice.layout)
        # Most stages have equal totals.
        stages = dict.fromkeys(zip(held, self._estimate.stages(choice), strict=True))
        by_stage = (memory_of(stage, choice, self._buffers, activations) for stage, activations in stages)
        memory = max(by_stage, key=lambda stage: (stage.total, stage.host))
        return FoundLayout(
            choice,
            memory,
            _fits(memory, self._request),
            bubble_fraction(choice),
            choice.keeps_batch,
            changes_of(choice, self._old),
            held,
            _differences(choice, self._old),
        )


def _differences(choice: Choice, old: ParallelLayout) -> tuple[Difference, ...]:
    """Return what training computes otherwise; a plan may keep the rows of the vocabulary by its flags."""
    job = choice.job
    before = sizes_of(
        old, *batch_of(job), None, divides_sequence=old.tensor > 1 and bool(job.raw.get("sequence_parallel"))
    )
    whole = None if job.global_batch_size is None else choice.global_batch
    divides_sequence = choice.has_sequence_parallelism
    after = sizes_of(choice.layout, choice.micro_batch, whole, None, divides_sequence=divides_sequence)
    return differences(job, before, after, choice.version)


def _fits(memory: Memory, request: SearchRequest) -> bool | None:
    if request.memory is not None and memory.total <= request.memory:
        return True
    return None if request.memory is None or request.is_least else False


def _kept(choice: Choice, different: Iterable[Difference]) -> tuple[bool, bool, bool]:
    """Return whether a layout changes global batch, mathematics, or rows of the vocabulary."""
    return not choice.keeps_global_batch, not is_same_training(different), not keeps_rows(choice)


def _form(choice: Choice, old: ParallelLayout, request: SearchRequest) -> tuple[bool | float, ...]:
    """Return how far a layout is from the old form, or from the guidance."""
    node = request.gpus_per_node
    return continuity(choice, old, node) if old.world > 1 else (not choice.keeps_batch, *guidance(choice, node))


def _rank(candidate: FoundLayout, old: ParallelLayout, request: SearchRequest) -> tuple[object, ...]:
    """Return a sort key, best first.

    What is within the limit of memory, keeps the global batch, the mathematics and the rows of the vocabulary comes
    first. A job that ran on several GPUs goes on in its form (`continuity`), then memory has room, and the nearest
    sizes follow. A job without a layout follows the guidance of `order.py`; then memory has room for the error of the
    estimate, a pipeline idles least, stages need no flags, as many GPUs of a node as possible share the experts, and
    there are no more virtual stages than that takes, which send more between stages ("Performance tips in PP and VPP
    sizing", Megatron-Bridge's docs/performance-guide.md).
    """
    choice, layout = candidate.choice, candidate.choice.layout
    needed = candidate.memory.total
    steps = pressure(needed, request.room)
    if old.world > 1:
        order: tuple[object, ...] = (steps, distance(layout, old))
    else:
        idle = int(idle_fraction(choice) / IDLE_STEP)
        shared_experts = min(layout.expert, request.gpus_per_node)
        order = (steps > 0, idle, candidate.changes, -shared_experts, layout.virtual_pipeline)
    kept = _kept(choice, candidate.differences)
    return (request.exceeds(needed), *kept, *_form(choice, old, request), *order, needed)


def join_virtual_stages(found: Iterable[FoundLayout]) -> list[tuple[FoundLayout, list[int]]]:
    """Return one of those layouts that differ in virtual stages alone, with the other numbers.

    Numbers that are not as acceptable, because they do not fit or change the batch, are left out.
    """
    rows: dict[ParallelLayout, tuple[FoundLayout, list[int]]] = {}
    for candidate in found:
        layout = candidate.choice.layout
        first, others = rows.setdefault(replace(layout, virtual_pipeline=1), (candidate, []))
        if candidate is not first and (candidate.fits, candidate.keeps_batch) == (first.fits, first.keeps_batch):
            others.append(layout.virtual_pipeline)
    return list(rows.values())


def with_batch(choice: Choice) -> Choice:
    """Set the batch of the job, or the nearest one that the layout allows.

    The micro batch is reduced before the global batch is changed, because that does not change training. Every step of
    a ramp is a multiple of micro batch x DP, too.
    """
    micro, whole = batch_of(choice.job)
    data = choice.layout.data
    if whole is None:  # as many micro batches as the pipeline has stages
        return replace(choice, micro_batch=micro, global_batch=micro * data * max(choice.microbatch_group, 1))
    steps = gcd(whole, ramp_divisor(choice.job))
    fitting = next((size for size in range(micro, 0, -1) if steps % (size * data) == 0), None)
    if fitting is not None:
        kept = replace(choice, micro_batch=fitting, global_batch=whole)
        if next(violations(kept, BATCH_RULES), None) is None:
            return kept
    step = micro * data * (choice.microbatch_group if choice.layout.virtual_pipeline > 1 else 1)
    return replace(choice, micro_batch=micro, global_batch=max(1, round(whole / step)) * step)
