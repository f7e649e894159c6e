"""The order of layouts: what a job keeps, and what experts choose where there is nothing to keep.

`plan` lists the layouts of one number of GPUs in this order, and an elastic job takes the first of them. Among numbers
of GPUs it compares how much of the time of all GPUs is used (`elastic.use_key`), which a plan need not.

Sources of the guidance: "Best Practices to achieve high performance on MoE training", guidelines 1 to 5
(megatron/core/transformer/moe/README.md, development head of August 2026); "Parallel Mapping Strategies"
(docs/performance-guide.md of Megatron-Bridge); Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (arXiv:2104.04473), takeaways 1 and 2.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.choice import Choice
from mcore_ckpt_ext.layout_choice.memory import bubble_fraction

# Smaller differences between idle fractions matter less than similarity to the old layout.
IDLE_STEP = 0.05
# The share of memory that an estimate may be wrong by.
ROOM = 0.1
# Of what a GPU needs under the old layout: more comes last while the memory of a GPU is unknown.
MOST_OF_USUAL = 1.25
_LONG_SEQUENCE = 8192


def changes_of(choice: Choice, old: ParallelLayout) -> int:
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


def leaves_node(layout: ParallelLayout, old: ParallelLayout, node: int) -> bool:
    """Return whether tensor- or expert-parallel groups leave a node that did not before."""
    experts = layout.expert * layout.expert_tensor
    return (layout.tensor != old.tensor and node % layout.tensor != 0) or (
        layout.expert > 1 and experts > old.expert * old.expert_tensor and node % experts != 0
    )


def keeps_rows(choice: Choice) -> bool:
    """Return whether the vocabulary keeps its rows, padding included, as far as they are known."""
    rows = choice.table.padded_rows
    return not rows.stored or rows(choice.layout.tensor) == rows.stored


def continuity(choice: Choice, old: ParallelLayout, node: int) -> tuple[bool, bool, int, int, bool]:
    """Return by how much a layout departs from the form of a job that goes on.

    Groups of tensor and expert parallelism stay inside nodes. The old sizes, with any number of data-parallel ranks,
    come before others; then what changes the form of the job least, idles least, and keeps the micro batch. With the
    old sizes idle time does not count.
    """
    layout = choice.layout
    keeps_sizes = layout.model_sizes() == old.model_sizes()
    idle = 0 if keeps_sizes else int(idle_fraction(choice) / IDLE_STEP)
    return leaves_node(layout, old, node), not keeps_sizes, changes_of(choice, old), idle, not choice.keeps_batch


def pressure(needed: int, room: int | None) -> int:
    """Return by how many steps a layout needs more memory of a GPU than there is room for."""
    return ceil((needed / room - 1) / ROOM) if room and room < needed else 0


def idle_fraction(choice: Choice) -> float:
    """Return the unused share of the GPUs' time: by the pipeline's bubble, and by uneven stages."""
    layers = [sum(chunks) for chunks in choice.split.layers] if choice.split else [1]
    balance = sum(layers) / (len(layers) * max(*layers, 1))
    return 1 - (1 - bubble_fraction(choice)) * balance


def guidance(choice: Choice, node: int) -> tuple[bool, bool, float]:
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
    return divides_short, layout.tensor > node, model + beyond
