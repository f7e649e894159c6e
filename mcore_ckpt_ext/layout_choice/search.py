"""Finds the layouts of a number of GPUs that Megatron accepts for a model, sorted from best to worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import gcd, isqrt, prod

from mcore_ckpt_ext.continuity.batch_sizes import ramp_divisor
from mcore_ckpt_ext.continuity.mathematics import Difference, differences, is_same_training, sizes_of
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.choice import Choice
from mcore_ckpt_ext.layout_choice.layer_wise import layer_wise_stages
from mcore_ckpt_ext.layout_choice.memory import Buffers, Memory, bubble_fraction, memory_of
from mcore_ckpt_ext.layout_choice.model_table import ModelTable, StageHolding
from mcore_ckpt_ext.layout_choice.options import Recomputation
from mcore_ckpt_ext.layout_choice.order import changes_of, distance, guidance, idle_fraction, leaves_node
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

_MOST_VIRTUAL_STAGES = 16
# Smaller differences between idle fractions matter less than similarity to the old layout.
_IDLE_STEP = 0.05
# The share of memory that an estimate may be wrong by.
ROOM = 0.1


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
        _, layout, reason = min(self.nearest.values(), key=lambda one: one[0])
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
    result = Search()

    @cache
    def splits(pipeline: int, virtual: int) -> StageSplit | None:
        return next(stage_splits(job, pipeline, virtual, request.version, job.mtp_num_layers or 0), None)

    @cache
    def holdings(split: StageSplit, tensor: int, expert_tensor: int, expert: int) -> tuple[StageHolding, ...]:
        return tuple(table.stages(split.ranges(), tensor, expert_tensor, expert))

    def shared_out(split: StageSplit, layout: ParallelLayout) -> tuple[StageHolding, ...]:
        held = holdings(split, layout.tensor, layout.expert_tensor, layout.expert)
        if buffers.layer_wise is None:
            return held
        return layer_wise_stages(
            table, split.ranges(), layout, held, buffers.layer_wise, high_bandwidth=buffers.high_bandwidth
        )

    def is_excluded(choice: Choice, rules: Sequence[NamedRule]) -> bool:
        broken = next(violations(choice, rules), None)
        if broken is not None:
            rule, reason = broken
            result.exclude(rule, distance(choice.layout, old), choice.layout, reason)
        return broken is not None

    def choice_of(layout: ParallelLayout, split: StageSplit | None = None) -> Choice:
        return Choice(job, table, layout, split, 1, 1, request.version)

    estimate = ActivationEstimate(job, request.recomputation)
    sizes = _Sizes(job, old, request)
    for dense in sizes.dense_layouts():
        if is_excluded(choice_of(dense), DENSE_RULES):
            continue
        for layout in sizes.expert_layouts(dense):
            if is_excluded(choice_of(layout), EXPERT_RULES):
                continue
            for staged in sizes.stage_layouts(layout):
                split = splits(staged.pipeline, staged.virtual_pipeline)
                choice = with_batch(choice_of(staged, split))
                if not is_excluded(choice, STAGE_RULES) and split is not None:
                    result.found.append(_weighed(choice, shared_out(split, staged), old, request, buffers, estimate))
    result.found.sort(key=lambda one: _rank(one, old, request))
    return result


def _weighed(
    choice: Choice,
    held: tuple[StageHolding, ...],
    old: ParallelLayout,
    request: SearchRequest,
    buffers: Buffers,
    estimate: ActivationEstimate,
) -> FoundLayout:
    # Most stages have equal totals.
    stages = dict.fromkeys(zip(held, estimate.stages(choice), strict=True))
    by_stage = (memory_of(stage, choice, buffers, activations) for stage, activations in stages)
    memory = max(by_stage, key=lambda one: (one.total, one.host))
    return FoundLayout(
        choice,
        memory,
        _fits(memory, request),
        bubble_fraction(choice),
        batch_of(choice.job) in ((choice.micro_batch, choice.global_batch), (choice.micro_batch, None)),
        changes_of(choice, old),
        held,
        _differences(choice, old),
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


def _rank(one: FoundLayout, old: ParallelLayout, request: SearchRequest) -> tuple[object, ...]:
    """Return a sort key, best first.

    What fits, keeps the batch and the mathematics comes first. A job that ran on several GPUs goes on in its form, its
    groups stay inside nodes, it idles least, and the nearest sizes follow. A job without a layout follows the guidance
    of `order.py`; then memory has room for the error of the estimate, a pipeline idles least, stages need no flags, as
    many GPUs of a node as possible share the experts, and there are no more virtual stages than that takes, which send
    more between stages ("Performance tips in PP and VPP sizing", Megatron-Bridge's docs/performance-guide.md).
    """
    choice, layout, node = one.choice, one.choice.layout, request.gpus_per_node
    acceptable = (not one.fits, one.fits is False, not one.keeps_batch, not one.keeps_mathematics)
    if old.world > 1:
        idle = int(one.bubble / _IDLE_STEP)
        order: tuple[object, ...] = (one.changes, leaves_node(layout, old, node), idle, distance(layout, old))
    else:
        is_crowded = request.memory is not None and one.memory.total > request.memory * (1 - ROOM)
        idle = int(idle_fraction(choice) / _IDLE_STEP)
        shared_experts = min(layout.expert, node)
        order = (*guidance(choice, node), is_crowded, idle, one.changes, -shared_experts, layout.virtual_pipeline)
    return (*acceptable, *order, one.memory.total)


def by_virtual_stages(found: Iterable[FoundLayout]) -> list[tuple[FoundLayout, list[int]]]:
    """Return one of those layouts that differ in virtual stages alone, with the other numbers.

    Numbers that are not as acceptable, because they do not fit or change the batch, are left out.
    """
    rows: dict[ParallelLayout, tuple[FoundLayout, list[int]]] = {}
    for one in found:
        layout = one.choice.layout
        first, others = rows.setdefault(replace(layout, virtual_pipeline=1), (one, []))
        if one is not first and (one.fits, one.keeps_batch) == (first.fits, first.keeps_batch):
            others.append(layout.virtual_pipeline)
    return list(rows.values())


class _Sizes:
    """The sizes of every dimension to evaluate, respecting pins.

    Combinations are made in three steps, so that a rule about the first dimensions excludes all combinations of the
    later ones at once. Dimensions of later steps are as near to those of the old layout as possible.
    """

    def __init__(self, job: JobArguments, old: ParallelLayout, request: SearchRequest) -> None:
        self._old, self._gpus, self._pins = old, request.gpus, request.pins
        self._layers, self._experts = job.num_layers or 1, job.num_experts or 1
        small = [size for size in range(1, isqrt(request.gpus) + 1) if request.gpus % size == 0]
        self._divisors = sorted({*small, *(request.gpus // size for size in small)})

    def dense_layouts(self) -> Iterator[ParallelLayout]:
        """Yield combinations of TP, PP and CP whose product divides the number of GPUs."""
        gpus, pins = self._gpus, self._pins
        # If pins make this impossible, combinations are evaluated nevertheless, to report the violated rule.
        can_divide = gpus % prod(pins.get(name, 1) for name in ("tensor", "pipeline", "context")) == 0
        pipelines = [size for size in self._divisors if size <= self._layers + 2]
        choices = (self._of("tensor", self._divisors), self._of("pipeline", pipelines))
        for tensor, pipeline, context in product(*choices, self._of("context", self._divisors)):
            ranks = tensor * pipeline * context
            if can_divide and gpus % ranks:
                continue
            dense = ParallelLayout(
                tensor=tensor, pipeline=pipeline, virtual_pipeline=1, expert=1, expert_tensor=tensor, context=context,
                data=max(gpus // ranks, 1), world=gpus,
            )  # fmt: skip
            near = min(self.expert_layouts(dense), key=self._distance)
            yield min(self.stage_layouts(near), key=self._distance)

    def expert_layouts(self, dense: ParallelLayout) -> Iterator[ParallelLayout]:
        """Yield the layout with every size of EP and ETP."""
        for expert in self._of("expert", [size for size in self._divisors if size <= self._experts]):
            tensors = {dense.tensor}
            if expert > 1:
                tensors |= {1, self._old.expert_tensor}
            elif self._old.expert == 1 and self._old.separates_experts:
                tensors.add(self._old.expert_tensor)
            for expert_tensor in self._of("expert_tensor", sorted(tensors)):
                yield replace(dense, expert=expert, expert_tensor=expert_tensor)

    def stage_layouts(self, layout: ParallelLayout) -> Iterator[ParallelLayout]:
        """Yield the layout with every number of virtual stages."""
        # With more pipeline ranks than layers, some ranks have only the embedding or the loss.
        # Two virtual stages may be more than the layers, too (`E|t|t||L`).
        least = 2 if layout.pipeline <= self._layers else 1
        per_rank = self._layers // layout.pipeline
        most = max(least, min(_MOST_VIRTUAL_STAGES, per_rank)) if layout.pipeline > 1 else 1
        # Many stages are listed if they have equal numbers of layers.
        even = [size for size in range(most + 1, per_rank + 1) if self._layers % (layout.pipeline * size) == 0]
        for stages in self._of("virtual_pipeline", [*range(1, most + 1), *(even if layout.pipeline > 1 else ())]):
            yield replace(layout, virtual_pipeline=stages)

    def _of(self, name: str, otherwise: Sequence[int]) -> Sequence[int]:
        return [self._pins[name]] if name in self._pins else otherwise

    def _distance(self, layout: ParallelLayout) -> float:
        return distance(layout, self._old)


def batch_of(job: JobArguments) -> tuple[int, int | None]:
    """Return the micro batch, 1 if unknown, and the global batch of a job, None if unknown."""
    micro = job.raw.get("micro_batch_size")
    return micro if isinstance(micro, int) and micro > 0 else 1, job.global_batch_size


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
