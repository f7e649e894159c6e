"""The order of layouts: what a job keeps, and what experts choose where there is nothing to keep.

`plan` lists the layouts of one number of GPUs by `plan_key`, and an elastic job takes the first of them. It compares
numbers of GPUs by `usage_key`: how much of the time of all GPUs is used. The smallest key is the best.

Sources of the guidance: "Best Practices to achieve high performance on MoE training", guidelines 1 to 5
(megatron/core/transformer/moe/README.md, development head of August 2026); "Parallel Mapping Strategies"
(docs/performance-guide.md of Megatron-Bridge); Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (arXiv:2104.04473), takeaways 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import log2

from mcore_ckpt_ext.continuity.dependencies import Difference
from mcore_ckpt_ext.continuity.mathematics import is_same_training
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.choice import Choice
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout, SearchRequest

_IDLE_STEP = 0.05
_LONG_SEQUENCE = 8192


def plan_key(candidate: FoundLayout, old: ParallelLayout, request: SearchRequest) -> tuple[object, ...]:
    """Return a sort key of layouts of one number of GPUs, best first.

    What is within the limit of memory, and has the least `key_without_memory`, comes first. If the job ran on several
    GPUs, memory then has room, and the nearest sizes follow. Otherwise memory has room for the error of the estimate, a
    pipeline idles least, stages need no flags, as many GPUs of a node as possible share the experts, and there are no
    more virtual stages than that takes, which send more between stages ("Performance tips in PP and VPP sizing",
    Megatron-Bridge's docs/performance-guide.md).
    """
    layout = candidate.choice.layout
    needed = candidate.memory.total
    pressure = request.pressure(needed)
    with_memory: tuple[float, ...]
    if old.world > 1:
        with_memory = (pressure, distance(layout, old))
    else:
        with_memory = (
            pressure > 0,
            idle_steps(idle_fraction(candidate.choice)),
            candidate.form_changes,
            -min(layout.expert, request.gpus_per_node),
            layout.virtual_pipeline,
        )
    without_memory = key_without_memory(candidate.choice, candidate.differences, old, request)
    return (request.exceeds(needed), *without_memory, *with_memory, needed)


def key_without_memory(
    choice: Choice, differences: Iterable[Difference], old: ParallelLayout, request: SearchRequest
) -> tuple[bool | float, ...]:
    """Return the part of `plan_key` that does not depend on memory.

    The global batch, the mathematics and the rows of the vocabulary are kept. A job that ran on several GPUs goes on in
    its form; another one follows the guidance.
    """
    node = request.gpus_per_node
    departure: tuple[bool | float, ...]
    if old.world > 1:
        departure = departure_from_form(choice, old, node)
    else:
        departure = (not choice.keeps_batch, *departure_from_guidance(choice, node))
    return (not choice.keeps_global_batch, not is_same_training(differences), not keeps_rows(choice), *departure)


def usage_key(candidate: FoundLayout, old: ParallelLayout, request: SearchRequest) -> tuple[object, ...]:
    """Return a sort key of layouts for different numbers of GPUs, best first.

    TP and EP within a node, or no larger than before; most of the GPUs' time used, by steps of 5 %; the global batch
    kept; the old model-parallel sizes with other data-parallel ranks; least memory pressure; the old form of stages;
    least idle. With the old sizes, the bubble counts as used: the job was meant to have it.

    Args:
        candidate: the layout.
        old: the layout of the job's own arguments.
        request: all GPUs.
    """
    layout = candidate.choice.layout
    keeps_sizes = layout.model_sizes() == old.model_sizes()
    idle = 1 - layout.world / request.gpus * (1.0 if keeps_sizes else 1 - idle_fraction(candidate.choice))
    return (
        leaves_node(layout, old, request.gpus_per_node),
        idle_steps(idle),
        not candidate.choice.keeps_global_batch,
        not keeps_sizes,
        request.pressure(candidate.memory.total),
        candidate.form_changes,
        idle,
    )


def form_changes(choice: Choice, old: ParallelLayout) -> int:
    """Return how much of the job's form changes, besides sizes that every layout may change.

    0 for the old layout in the old flags; otherwise 1, and 1 more for another context parallel size, 1 for other
    numbers of layers in the first or last stage than the job had, 2 for another `--pipeline-model-parallel-layout`.
    """
    split = dict(choice.split.arguments) if choice.split else {}
    new = {name for name, value in split.items() if value and value != choice.job.value(name)}
    if not new and choice.layout == replace(old, unknown=choice.layout.unknown):
        return 0
    is_described = "pipeline_model_parallel_layout" in new
    return 1 + (choice.layout.context != old.context) + (2 if is_described else bool(new))


def distance(layout: ParallelLayout, old: ParallelLayout) -> float:
    """Return the distance between two layouts: the number of doublings, summed over all dimensions."""
    before = old.model_sizes()
    return sum(abs(log2(size / before[name])) for name, size in layout.model_sizes().items())


def crosses_nodes(group: int, layout: ParallelLayout, node: int) -> bool:
    """Return whether a group of so many consecutive ranks is on two nodes or more."""
    return layout.world > node and node % group != 0


def leaves_node(layout: ParallelLayout, old: ParallelLayout, node: int) -> bool:
    """Return whether tensor- or expert-parallel groups leave a node that did not before."""
    experts = layout.expert * layout.expert_tensor
    return (layout.tensor != old.tensor and crosses_nodes(layout.tensor, layout, node)) or (
        layout.expert > 1 and experts > old.expert * old.expert_tensor and crosses_nodes(experts, layout, node)
    )


def keeps_rows(choice: Choice) -> bool:
    """Return whether the vocabulary keeps its rows, padding included, as far as they are known."""
    rows = choice.table.padded_rows
    return not rows.stored or rows(choice.layout.tensor) == rows.stored


def departure_from_form(choice: Choice, old: ParallelLayout, node: int) -> tuple[bool, bool, int, int, bool]:
    """Return by how much a layout departs from the form of a job that goes on.

    Groups of tensor and expert parallelism stay inside nodes. The old sizes, with any number of data-parallel ranks,
    come before others; then what changes the form of the job least, idles least, and keeps the micro batch. With the
    old sizes idle time does not count.
    """
    layout = choice.layout
    keeps_sizes = layout.model_sizes() == old.model_sizes()
    idle = 0 if keeps_sizes else idle_steps(idle_fraction(choice))
    return leaves_node(layout, old, node), not keeps_sizes, form_changes(choice, old), idle, not choice.keeps_batch


def idle_steps(idle: float) -> int:
    """Return an unused share of the GPUs' time in steps of 5 %; within one, the old sizes matter more."""
    return int(idle / _IDLE_STEP)


def idle_fraction(choice: Choice) -> float:
    """Return the unused share of the GPUs' time: by the pipeline's bubble, and by uneven stages."""
    layers = [sum(chunks) for chunks in choice.split.layers] if choice.split else [1]
    balance = sum(layers) / (len(layers) * max(*layers, 1))
    return 1 - (1 - bubble_fraction(choice)) * balance


def departure_from_guidance(choice: Choice, node: int) -> tuple[bool, bool, float]:
    """Return by how much a layout departs from the guidance for a job that begins.

    Context parallelism is for sequences of 8,192 tokens or more (guideline 5). Tensor parallelism stays inside a node
    (takeaway 1). Then there is as little model parallelism as memory allows (guideline 1): the doublings of TP, PP, CP
    and of the tensor parallelism of experts, which are rather divided by EP (guideline 4). Expert parallelism counts by
    the doublings beyond a node, where PP is preferred (guidelines 2 and 3).
    """
    layout = choice.layout
    experts_tensor = layout.expert_tensor if choice.job.num_experts else 1
    experts = layout.expert * experts_tensor if layout.expert > 1 else 1
    model = log2(layout.tensor * layout.pipeline * layout.context * experts_tensor)
    beyond = sum(log2(size / node) for size in (layout.tensor, experts) if size > node)
    divides_short = layout.context > 1 and (choice.job.seq_length or 0) < _LONG_SEQUENCE
    return divides_short, crosses_nodes(layout.tensor, layout, node), model + beyond


def bubble_fraction(choice: Choice) -> float:
    """Return the share of a step that a pipeline rank idles: `(PP - 1) / (VPP x micro batches + PP - 1)`.

    Source, for the idle time relative to the ideal one, `(PP - 1) / (VPP x micro batches)`: Narayanan et al.,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv:2104.04473), section 2.2.
    """
    layout = choice.layout
    work = layout.virtual_pipeline * max(choice.microbatches, 1)
    return (layout.pipeline - 1) / (work + layout.pipeline - 1)
