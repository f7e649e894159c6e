"""Finds the layouts of a number of GPUs that Megatron accepts for a model, sorted from best to worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from mcore_ckpt_ext.continuity.batch_sizes import batch_divisor
from mcore_ckpt_ext.continuity.dependencies import Difference
from mcore_ckpt_ext.continuity.mathematics import differences
from mcore_ckpt_ext.continuity.sizes import sizes_of
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.choice import Choice, batch_of
from mcore_ckpt_ext.layout_choice.combinations import Combinations
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout, SearchRequest
from mcore_ckpt_ext.layout_choice.layer_wise import layer_wise_stages
from mcore_ckpt_ext.layout_choice.memory import Buffers, memory_of
from mcore_ckpt_ext.layout_choice.model_table import ModelTable, StageHolding
from mcore_ckpt_ext.layout_choice.order import distance, form_changes, key_without_memory, plan_key
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


class Exclusion(NamedTuple):
    """A layout that a rule excludes, its distance from the old one, and the reason."""

    distance: float
    layout: ParallelLayout
    reason: str


@dataclass
class Search:
    """The result of a search.

    Attributes:
        found: the accepted layouts, best first.
        excluded: the number of layouts excluded by each rule; layouts that differ only in sizes that the rule does not
            depend on count as one.
        nearest: for each rule, the excluded layout nearest to the old one.
    """

    found: list[FoundLayout] = field(default_factory=list)
    excluded: Counter[str] = field(default_factory=Counter)
    nearest: dict[str, Exclusion] = field(default_factory=dict)

    @property
    def nearest_first(self) -> list[Exclusion]:
        """The exclusions of `nearest`, the one nearest to the old layout first."""
        return sorted(self.nearest.values(), key=lambda exclusion: exclusion.distance)

    @property
    def refusal(self) -> Exclusion | None:
        """The excluded layout that is nearest to the old one; None if a layout is accepted."""
        return None if self.found else self.nearest_first[0]

    def exclude(self, rule: str, exclusion: Exclusion) -> None:
        """Count a layout that a rule excludes."""
        self.excluded[rule] += 1
        if rule not in self.nearest or exclusion.distance < self.nearest[rule].distance:
            self.nearest[rule] = exclusion


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
    result.found = [evaluation.evaluate(*accepted) for accepted in evaluation.accepted_layouts()]
    result.found.sort(key=lambda candidate: plan_key(candidate, old, request))
    return result


def first_of_search(
    job: JobArguments, table: ModelTable, old: ParallelLayout, request: SearchRequest, buffers: Buffers
) -> FoundLayout | None:
    """Return the first layout of `search`, without the memory of all others; None if there is none.

    Layouts are evaluated in the order of what does not depend on memory, until one of them is within the limit.
    """
    evaluation = _Evaluation(job, table, old, request, buffers)
    groups: dict[tuple[object, ...], list[tuple[Choice, StageSplit]]] = {}
    for choice, split in evaluation.accepted_layouts():
        key = key_without_memory(choice, _differences(choice, old), old, request)
        groups.setdefault(key, []).append((choice, split))
    found: list[FoundLayout] = []
    for _, group in sorted(groups.items()):
        evaluated = [evaluation.evaluate(*accepted) for accepted in group]
        found += evaluated
        if any(not request.exceeds(candidate.memory.total) for candidate in evaluated):
            break
    return min(found, key=lambda candidate: plan_key(candidate, old, request), default=None)


class _Evaluation:
    """The combinations of sizes that no rule excludes, and their memory."""

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

    def accepted_layouts(self) -> Iterator[tuple[Choice, StageSplit]]:
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
        """Return a choice without a batch yet, for rules that do not depend on it, or for `with_batch`."""
        return Choice(self._job, self._table, layout, split, 1, 1, self._request.version)

    def _is_excluded(self, choice: Choice, rules: Sequence[NamedRule]) -> bool:
        broken = next(violations(choice, rules), None)
        if broken is not None:
            rule, reason = broken
            self.result.exclude(rule, Exclusion(distance(choice.layout, self._old), choice.layout, reason))
        return broken is not None

    def _first_split(self, pipeline: int, virtual: int) -> StageSplit | None:
        return next(stage_splits(self._job, pipeline, virtual, self._request.version), None)

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

    def evaluate(self, choice: Choice, split: StageSplit) -> FoundLayout:
        """Estimate the memory of a layout."""
        held = self._stages(split, choice.layout)
        # Most stages have equal totals.
        stages = dict.fromkeys(zip(held, self._estimate.stages(choice), strict=True))
        by_stage = (memory_of(stage, choice, self._buffers, activations) for stage, activations in stages)
        memory = max(by_stage, key=lambda stage: (stage.total, stage.host))
        return FoundLayout(
            choice,
            memory,
            self._request.fits(memory.total),
            form_changes(choice, self._old),
            held,
            _differences(choice, self._old),
        )


def _differences(choice: Choice, old: ParallelLayout) -> tuple[Difference, ...]:
    """Return what training computes otherwise.

    Rows of the vocabulary are left out: `keeps_rows` compares them, because flags of a plan may keep them.
    """
    job = choice.job
    before = sizes_of(old, *batch_of(job), None, divides_sequence=bool(job.raw.get("sequence_parallel")))
    after = sizes_of(
        choice.layout,
        choice.micro_batch,
        None if job.global_batch_size is None else choice.global_batch,
        None,
        divides_sequence=choice.has_sequence_parallelism,
    )
    return differences(job, before, after, choice.version)


def join_virtual_stages(found: Iterable[FoundLayout]) -> list[tuple[FoundLayout, list[int]]]:
    """Return one of those layouts that differ in virtual stages alone, with the other numbers.

    Numbers that are not as acceptable, because they do not fit or change the batch, are left out.
    """
    rows: dict[ParallelLayout, tuple[FoundLayout, list[int]]] = {}
    for candidate in found:
        layout = candidate.choice.layout
        first, others = rows.setdefault(replace(layout, virtual_pipeline=1), (candidate, []))
        is_as_acceptable = candidate.fits == first.fits and candidate.choice.keeps_batch == first.choice.keeps_batch
        if candidate is not first and is_as_acceptable:
            others.append(layout.virtual_pipeline)
    return list(rows.values())


def with_batch(choice: Choice) -> Choice:
    """Set the batch of the job, or the nearest one that the layout allows.

    The micro batch is reduced before the global batch is changed, because that does not change training. Every step of
    a ramp is a multiple of micro batch x DP, too.
    """
    micro_batch, global_batch = batch_of(choice.job)
    data = choice.layout.data
    if global_batch is None:  # as many micro batches as the pipeline has stages
        global_batch = micro_batch * data * max(choice.microbatch_group, 1)
        return replace(choice, micro_batch=micro_batch, global_batch=global_batch)
    divisor = batch_divisor(choice.job)
    fitting = next((size for size in range(micro_batch, 0, -1) if divisor % (size * data) == 0), None)
    if fitting is not None:
        kept = replace(choice, micro_batch=fitting, global_batch=global_batch)
        if next(violations(kept, BATCH_RULES), None) is None:
            return kept
    multiple = micro_batch * data * (choice.microbatch_group if choice.layout.virtual_pipeline > 1 else 1)
    return replace(choice, micro_batch=micro_batch, global_batch=max(1, round(global_batch / multiple)) * multiple)
