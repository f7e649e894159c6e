"""The rules by which Megatron accepts or refuses the parallel sizes of experts, with their sources.

Unless a rule names other versions, it was read in core_v0.12.0 to 0.19.2 and the development head of August 2026.
"""

from __future__ import annotations

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.job.releases import SEPARATES_DIVIDED_EXPERTS
from mcore_ckpt_ext.layout_choice.choice import Choice


def check_experts(choice: Choice) -> str | None:
    """`validate_args`: experts exist, and are divided among the expert-parallel ranks."""
    return undivided_experts(choice.job.num_experts, choice.layout.expert)


def undivided_experts(experts: int | None, ranks: int) -> str | None:
    """Return why experts cannot be divided among expert-parallel ranks; None if they can."""
    if ranks == 1 or (experts and experts % ranks == 0):
        return None
    return f"{quantity(experts or 0, 'expert')} cannot be divided by EP {ranks}"


def check_expert_biases(choice: Choice) -> str | None:
    """`TransformerConfig.__post_init__`: experts with biases are not split (core_v0.15.0 to 0.19.2).

    Earlier releases do not check it; the rule holds for them, too.
    """
    job = choice.job
    ranks = choice.layout.expert_tensor
    if ranks == 1 or not (job.num_experts and job.add_bias_linear):
        return None
    return f"experts with biases cannot be split by ETP {ranks}"


def check_expert_tensor(choice: Choice) -> str | None:
    """Without expert parallelism, ETP is TP up to core_v0.18.2.

    Nothing refuses another, and the weights are mixed up or drift apart: see `ParallelLayout.divides_experts_alone`.
    """
    layout = choice.layout
    if not layout.divides_experts_alone or SEPARATES_DIVIDED_EXPERTS.is_of(choice.version):
        return None
    return f"without expert parallelism, ETP {layout.expert_tensor} has to be TP {layout.tensor} before Megatron 0.19"


def check_expert_world_size(choice: Choice) -> str | None:
    """`initialize_model_parallel` (parallel_state.py): the world size is a multiple of ETP x EP x PP."""
    layout = choice.layout
    needed = layout.expert_tensor * layout.expert * layout.pipeline
    if layout.world % needed:
        return f"{quantity(layout.world, 'GPU is', 'GPUs are')} not a multiple of ETP x EP x PP = {needed}"
    return None


def check_overlapped_experts(choice: Choice) -> str | None:
    """`TransformerConfig`: overlapped communication of experts needs EP, and virtual stages with PP.

    It applies from core_v0.14.0 on.
    """
    layout = choice.layout
    if not choice.job.raw.get("overlap_moe_expert_parallel_comm"):
        return None
    if layout.expert == 1:
        return "--overlap-moe-expert-parallel-comm needs EP 2 or more"
    if layout.pipeline > 1 and layout.virtual_pipeline == 1:
        return "--overlap-moe-expert-parallel-comm needs virtual stages with PP"
    return None
