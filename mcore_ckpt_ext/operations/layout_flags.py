"""A layout as Megatron's arguments and as flags to paste, with notes about what it changes."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.job.job_arguments import JobArguments, is_hybrid
from mcore_ckpt_ext.layout.weight_shards import WEIGHT_SHARDS
from mcore_ckpt_ext.layout_choice.search import FoundLayout, batch_of


def arguments_of(one: FoundLayout) -> dict[str, Any]:
    """Return Megatron's arguments of a layout, as they are after parsing."""
    choice, layout = one.choice, one.choice.layout
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "context_parallel_size": layout.context,
        "data_parallel_size": layout.data,
        "world_size": layout.world,
        **(dict(choice.split.arguments) if choice.split else {}),
    }


def flags_of(one: FoundLayout) -> list[str]:
    """Return the job's flags for a layout, as Megatron spells them."""
    choice, layout = one.choice, one.choice.layout
    flags = [
        f"--tensor-model-parallel-size {layout.tensor}",
        f"--pipeline-model-parallel-size {layout.pipeline}",
        f"--context-parallel-size {layout.context}",
    ]
    if choice.job.num_experts:
        flags += [
            f"--expert-model-parallel-size {layout.expert}",
            f"--expert-tensor-parallel-size {layout.expert_tensor}",
        ]
    split = dict(choice.split.arguments) if choice.split else {}
    text = split.get("pipeline_model_parallel_layout")
    # Virtual stages of hybrid models are only given in their pattern.
    if layout.virtual_pipeline > 1 and not text and not is_hybrid(choice.job):
        flags.append(f"--num-virtual-stages-per-pipeline-rank {layout.virtual_pipeline}")
    for name, value in split.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value:
            flags.append(f"{flag} '{value}'" if isinstance(value, str) else f"{flag} {value}")
    if choice.has_sequence_parallelism:
        flags.append("--sequence-parallel")
    if not choice.job.is_set("global_batch_size"):
        return flags
    flags += [f"--micro-batch-size {choice.micro_batch}", f"--global-batch-size {choice.global_batch}"]
    if choice.global_batch != batch_of(choice.job)[1]:
        flags.append("--override-opt_param-scheduler")
    return flags


def notes_of(one: FoundLayout, job: JobArguments, keeps_random_state: bool) -> list[str]:
    """Return notes about what a layout changes for the user."""
    choice = one.choice
    micro, whole = batch_of(job)
    notes = []
    if choice.global_batch != whole:
        notes.append(
            f"the global batch changes from {whole} to {choice.global_batch}: the schedule is counted in samples, and "
            "takes the values of the command line"
        )
    elif choice.micro_batch != micro:
        notes.append(f"the micro batch changes from {micro} to {choice.micro_batch}; the global batch stays")
    if job.raw.get("use_megatron_fsdp"):
        notes.append("planned for the distributed optimizer: --use-megatron-fsdp divides weights and gradients, too")
    if any(job.raw.get(name, 1) not in (None, 1) for name in WEIGHT_SHARDS):
        notes.append("planned without weight shards: leave --tensor-parallel-num-weight-shards out")
    if job.rampup_batch_size:
        notes.append("the batch size ramps up: see that every step of the ramp is a multiple of micro batch x DP")
    if not keeps_random_state:
        notes.append("random states are reinitialized, as in stock Megatron on a changed layout")
    if choice.has_sequence_parallelism and not job.raw.get("sequence_parallel"):
        notes.append("--sequence-parallel is needed to train experts under tensor parallelism")
    return notes
