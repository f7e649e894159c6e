"""A layout as Megatron's arguments and as flags to paste, with notes about what it changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mcore_ckpt_ext.continuity.batch_sizes import SCHEDULES, counts_by_layout, ignored_schedule, sizes_to_come
from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.job.dimensions import OF_MODEL, SIZE_ARGUMENTS, VIRTUAL_STAGE_ARGUMENTS
from mcore_ckpt_ext.job.hybrid_pattern import is_hybrid
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.weight_shards import WEIGHT_SHARDS
from mcore_ckpt_ext.layout_choice.choice import Choice, batch_of
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout
from mcore_ckpt_ext.layout_choice.options import Recomputation
from mcore_ckpt_ext.layout_choice.order import keeps_rows
from mcore_ckpt_ext.layout_choice.stage_activations import recomputation_of


def arguments_of(candidate: FoundLayout, changes: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return Megatron's arguments of a layout, as they are after parsing; see `flags_of`."""
    choice = candidate.choice
    layout = choice.layout
    arguments: dict[str, Any] = {SIZE_ARGUMENTS[name]: size for name, size in layout.sizes().items()}
    arguments[SIZE_ARGUMENTS["virtual_pipeline"]] = layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
    arguments |= _batch_arguments(choice)
    if choice.split:
        arguments |= dict(choice.split.arguments)
    if divisor := _divisor(candidate):
        arguments["make_vocab_size_divisible_by"] = divisor
    if _overrides_schedule(choice, changes):
        arguments["override_opt_param_scheduler"] = True
    if _keeps_stored_schedule(choice, changes):
        arguments["use_checkpoint_opt_param_scheduler"] = True
    return arguments | dict(changes)


def _batch_arguments(choice: Choice) -> dict[str, Any]:
    """Return the arguments of the batch, if it is known.

    With a schedule of it, Megatron takes micro batch x DP for the global batch (`validate_args`, core_v0.18.0 to
    0.19.2). A layout that does not divide the sizes to come has a batch of its own instead of any schedule.
    """
    if batch_of(choice.job)[1] is None:
        return {}
    arguments = {"micro_batch_size": choice.micro_batch, "global_batch_size": choice.global_batch}
    if not choice.keeps_global_batch:
        return arguments | {name: None for name in SCHEDULES if choice.job.value_of(name)}
    if keeps_schedule(choice):
        arguments["global_batch_size"] = choice.micro_batch * choice.layout.data
    return arguments


def keeps_schedule(choice: Choice) -> bool:
    """Return whether `--step-batch-size-schedule` stays; Megatron refuses a global batch with it."""
    return bool(choice.job.step_batch_size_schedule and choice.keeps_global_batch)


def _overrides_schedule(choice: Choice, changes: Mapping[str, Any]) -> bool:
    """Return whether the schedule of the command line has to replace that of the checkpoint.

    It has to under another global batch, because it is counted in samples. Megatron asserts that its two flags
    are not given together (`OptimizerParamScheduler.__init__`).
    """
    keeps_schedule = {**choice.job.raw, **changes}.get("use_checkpoint_opt_param_scheduler")
    return batch_of(choice.job)[1] not in (choice.global_batch, None) and not keeps_schedule


def _keeps_stored_schedule(choice: Choice, changes: Mapping[str, Any]) -> bool:
    """Return whether the schedule of the checkpoint has to replace that of the command line.

    It has to where iterations stand for another number of samples, although the batch is the same.
    """
    is_overridden = {**choice.job.raw, **changes}.get("override_opt_param_scheduler")
    is_other = _batch_arguments(choice).get("global_batch_size") != choice.job.global_batch_size
    is_known = choice.job.global_batch_size is not None
    return counts_by_layout(choice.job) and is_known and is_other and not is_overridden


def _divisor(candidate: FoundLayout) -> int | None:
    """Return the value of `--make-vocab-size-divisible-by` that keeps the rows of the vocabulary."""
    return candidate.choice.table.padded_rows.divisor_for(candidate.choice.layout.tensor)


def flags_of(candidate: FoundLayout, changes: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Return the job's flags for a layout, as Megatron spells them.

    Args:
        candidate: the layout.
        changes: what the job changes besides, by the name of the argument.
    """
    choice = candidate.choice
    layout = choice.layout
    sizes = {
        dimension.argument: getattr(layout, dimension.name)
        for dimension in sorted(OF_MODEL, key=lambda dimension: dimension.is_of_experts)
        if dimension.name != "virtual_pipeline" and (choice.job.num_experts or not dimension.is_of_experts)
    }
    flags = [f"--{argument.replace('_', '-')} {size}" for argument, size in sizes.items()]
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
    if (divisor := _divisor(candidate)) and "make_vocab_size_divisible_by" not in changes:
        flags.append(f"--make-vocab-size-divisible-by {divisor}")
    batch = {name: size for name, size in _batch_arguments(choice).items() if size is not None}
    if keeps_schedule(choice):
        batch.pop("global_batch_size", None)
    flags += [f"--{name.replace('_', '-')} {size}" for name, size in batch.items()]
    if _overrides_schedule(choice, changes):
        flags.append("--override-opt_param-scheduler")
    if _keeps_stored_schedule(choice, changes):
        flags.append("--use-checkpoint-opt_param-scheduler")
    return flags


def keeps_grid(layout: ParallelLayout, old: ParallelLayout) -> bool:
    """Return whether random states are restored: their ranks are those of the old grid of TP and PP."""
    return (layout.tensor, layout.pipeline) == (old.tensor, old.pipeline)


def notes_of(candidate: FoundLayout, job: JobArguments, keeps_random_state: bool) -> list[str]:
    """Return notes about what a layout changes for the user."""
    choice = candidate.choice
    micro, whole = batch_of(job)
    notes = []
    if whole is None:
        notes.append("the global batch is unknown: state it with --argument global_batch_size=NUMBER")
    elif choice.global_batch != whole:
        notes.append(
            f"the global batch changes from {whole} to {choice.global_batch}: the schedule is counted in samples, and "
            "takes the values of the command line"
        )
    elif choice.micro_batch != micro:
        notes.append(f"the micro batch changes from {micro} to {choice.micro_batch}; the global batch stays")
    rows = choice.table.padded_rows
    if not keeps_rows(choice):
        padded = quantity(rows(choice.layout.tensor), "row")
        notes.append(
            f"the vocabulary is padded from {rows.stored:,} to {padded}: untrained rows take part in the softmax"
        )
    if job.raw.get("use_megatron_fsdp"):
        notes.append("what is read is that of a job without --use-megatron-fsdp, whose ranks read parts of weights")
    if any(job.raw.get(name, 1) not in (None, 1) for name in WEIGHT_SHARDS):
        notes.append("planned without weight shards: leave --tensor-parallel-num-weight-shards out")
    if len(sizes_to_come(job, job.consumed_train_samples or 0)) > 1:
        notes += _notes_of_schedule(choice, job)
    if not keeps_random_state:
        notes.append("random states are reinitialized, from --seed and the iteration")
    if choice.has_sequence_parallelism and not job.raw.get("sequence_parallel"):
        notes.append("--sequence-parallel is needed to train experts under tensor parallelism")
    return notes


def _notes_of_schedule(choice: Choice, job: JobArguments) -> Iterator[str]:
    """Yield why the steps of the batch to come are not those of the job; nothing if they are."""
    at_once = f"the global batch is {choice.global_batch} at once"
    ignored = ignored_schedule(job, choice.version)
    if ignored:
        yield f"Megatron {choice.version} does not run --{ignored.replace('_', '-')}: {at_once}"
    elif not choice.keeps_global_batch:
        share = choice.micro_batch * choice.layout.data
        yield f"a step of the batch size to come is not a multiple of micro batch x DP = {share}: {at_once}"


_OF_FULL_RECOMPUTATION = {"recompute_method": "uniform", "recompute_num_layers": 1}
_RECOMPUTATION = ("recompute_granularity", *_OF_FULL_RECOMPUTATION, "distribute_saved_activations")


def with_recomputation(job: JobArguments, recomputation: Recomputation) -> JobArguments:
    """Return a job with another recomputation of activations; the job itself if it is its own.

    `TransformerConfig.__post_init__` takes a method and a number of layers with full recomputation, and only then;
    `validate_args` takes distributed activations only then (core_v0.16.1 and 0.19.2).
    """
    if recomputation is recomputation_of(job, None):
        return job
    arguments: dict[str, Any] = dict.fromkeys(_RECOMPUTATION)
    if recomputation is not Recomputation.NONE:
        arguments["recompute_granularity"] = recomputation.value
    if recomputation is Recomputation.FULL:
        arguments |= _OF_FULL_RECOMPUTATION
    return job.replace(**arguments)


def recomputation_flags(candidate: FoundLayout, job: JobArguments) -> list[str]:
    """Return the flags by which a layout's job recomputes otherwise than the job `job` before."""
    running = candidate.choice.job.raw
    changed = [name for name in _RECOMPUTATION if running.get(name) and running[name] != job.raw.get(name)]
    return [f"--{name.replace('_', '-')} {running[name]}" for name in changed]


def _removed_recomputation(candidate: FoundLayout, job: JobArguments) -> list[str]:
    """Return the arguments of the job's recomputation that another one must not have.

    `--recompute-activations` is stored as selective recomputation, and replaces any other (`validate_args`).
    """
    running = candidate.choice.job.raw
    is_replaced = job.raw.get(_RECOMPUTATION[0]) == Recomputation.SELECTIVE.value != running.get(_RECOMPUTATION[0])
    removed = [name for name in _RECOMPUTATION if job.raw.get(name) and not running.get(name)]
    return [*removed, *(["recompute_activations"] if is_replaced else [])]


def removed_flags_of(candidate: FoundLayout, job: JobArguments) -> list[str]:
    """Return flags of the old job that contradict a layout, and that a new command line must not have.

    `validate_args` (megatron/training/arguments.py, core_v0.12.0 to 0.19.2) accepts one way of dividing the layers.
    """
    choice = candidate.choice
    split = dict(choice.split.arguments) if choice.split else {}
    removed = {name: value for name in split if (value := job.value(name)) and value != split[name]}
    removed |= {
        name: value for name in VIRTUAL_STAGE_ARGUMENTS if isinstance(value := job.raw.get(name), int) and value > 0
    }
    if choice.layout.virtual_pipeline > 1 and not split.get("pipeline_model_parallel_layout"):
        removed.pop("num_virtual_stages_per_pipeline_rank", None)  # given again
    if job.raw.get("pipeline_model_parallel_layout") and not split.get("pipeline_model_parallel_layout"):
        removed.setdefault("pipeline_model_parallel_layout", "...")
    running = {**choice.job.raw, **_batch_arguments(choice)}
    schedules = [name for name in SCHEDULES if job.value_of(name) and not running.get(name)]
    removed_names = (*removed, *_removed_recomputation(candidate, job), *schedules)
    return [f"--{name.replace('_', '-')}" for name in removed_names]
