"""Chooses the layout with which a job goes on with another number of GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mcore_ckpt_ext.continuity.batch_sizes import SCHEDULES, global_batch_of, run_by, with_stated_batch
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError, format_bytes, quantity, reraise_as_unreadable
from mcore_ckpt_ext.families.passed_arguments import check_passed
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.target import version_number
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.dimensions import PINS, VIRTUAL_STAGE_ARGUMENTS
from mcore_ckpt_ext.job.hybrid_pattern import is_hybrid
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.stage_layout import StageLayout
from mcore_ckpt_ext.layout_choice.choice import batch_of
from mcore_ckpt_ext.layout_choice.elastic import ElasticResult, choose
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout, SearchRequest
from mcore_ckpt_ext.layout_choice.memory import Memory
from mcore_ckpt_ext.layout_choice.order import bubble_fraction
from mcore_ckpt_ext.layout_choice.padded_rows import ROWS_DIVISOR
from mcore_ckpt_ext.layout_choice.stage_activations import recomputation_of
from mcore_ckpt_ext.operations.assumed_release import release_of
from mcore_ckpt_ext.operations.job_buffers import buffers_of
from mcore_ckpt_ext.operations.known_arguments import with_derived_arguments
from mcore_ckpt_ext.operations.layout_flags import (
    arguments_of,
    flags_of,
    keeps_grid,
    keeps_schedule,
    notes_of,
    removed_flags_of,
)
from mcore_ckpt_ext.operations.layout_plan import check_gpus
from mcore_ckpt_ext.operations.parameter_table import table_of, table_of_arguments
from mcore_ckpt_ext.operations.short_repr import ShortRepr
from mcore_ckpt_ext.versions import Version

_SHOWN = 3


@dataclass(frozen=True, repr=False)
class ChosenLayout(ShortRepr):
    """The layout with which a job goes on.

    Attributes:
        gpus: the number of GPUs that train.
        waiting: the number of GPUs that wait, because no layout uses them.
        layout: its sizes, in words.
        flags_layout: the layout of the job's own flags, in words.
        is_of_flags: whether the job's own flags fit, so that nothing changes.
        sizes: the size of each dimension: `{"tp": 4, "pp": 4, ..., "dp": 3}`.
        micro_batch_size: samples that a rank processes at once.
        global_batch_size: samples of an iteration.
        old_batch_sizes: micro batch and global batch of the job's own flags.
        memory: the estimated memory of the fullest GPU, in bytes.
        bubble: the idle share of the pipeline, 0 to 1.
        arguments: Megatron's arguments to set before it validates them, by name.
        flags: the same as flags for a command line.
        removed_flags: flags of the job that contradict these.
        notes: changes for the user.
    """

    gpus: int
    waiting: int
    layout: str
    flags_layout: str
    is_of_flags: bool
    sizes: Mapping[str, int]
    micro_batch_size: int
    global_batch_size: int
    old_batch_sizes: tuple[int, int]
    memory: Memory
    bubble: float
    arguments: Mapping[str, object]
    flags: str
    removed_flags: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def reason(self) -> str:
        """The choice in one line."""
        micro, whole = self.old_batch_sizes
        replaced = "its schedule" if any(map(self.arguments.__contains__, SCHEDULES)) else whole
        batch = (
            f"global batch {whole} kept"
            if self.global_batch_size == replaced
            else f"global batch {self.global_batch_size} in place of {replaced}"
        )
        if self.micro_batch_size != micro:
            batch += f", micro batch {self.micro_batch_size} in place of {micro}"
        chosen = self.layout if self.is_of_flags else f"{self.layout} in place of {self.flags_layout}"
        waiting = f"; {quantity(self.waiting, 'GPU waits', 'GPUs wait')}" if self.waiting else ""
        return f"{self.gpus} of {quantity(self.gpus + self.waiting, 'GPU')}: {chosen}; {batch}{waiting}"


def choose_layout(
    run: str | os.PathLike[str] | None,
    gpus: int,
    *,
    arguments: Mapping[str, object] = MappingProxyType({}),
    gpus_per_node: int = 8,
    gpu_memory: int | None = None,
    megatron_version: str | None = None,
    may_change_batch: bool = False,
) -> ChosenLayout:
    """Choose the layout with which a job goes on on a number of GPUs; reads only metadata.

    Training stays the same: the global batch, the sequence and context parallelism, and the rows of the vocabulary. If
    the job's own layout fits the GPUs, it is chosen, with more or fewer data-parallel ranks. Otherwise the first by
    these questions: Do tensor and expert parallelism stay inside a node? How much of the time of all GPUs is used? Are
    TP, PP, EP kept? How much memory does a GPU need? GPUs that no such layout uses wait.

    Args:
        run: a run folder (its newest iteration) or an iteration folder; None for a job without a checkpoint yet.
        gpus: the number of GPUs that there are.
        arguments: the job's own arguments, by Megatron's names, where they differ from those of the job that saved;
            without a checkpoint all that describe the model and the job.
        gpus_per_node: the GPUs of a node.
        gpu_memory: bytes of a GPU; layouts that need more are not chosen. Without it, those that need about as much as
            the job's own layout come first.
        megatron_version: the release that will run; by default the installed one, else the newest known.
        may_change_batch: use more GPUs by another global batch, if the job's cannot be kept on them.

    Raises:
        UsageError: a value is invalid, or the job has no global batch size.
        CheckpointError: the checkpoint cannot be read, or does not describe its model completely.
        UnsupportedCheckpointError: no layout fits; the message names the nearest ones and why not.

    Example:
        >>> chosen = choose_layout("run", 6, gpus_per_node=2)
        >>> chosen.reason
        '4 of 6 GPUs: TP2 x PP2 x DP1; global batch 8 kept; 2 GPUs wait'
        >>> choose_layout("run", 2, gpus_per_node=2).reason
        '2 of 2 GPUs: TP2 x PP1 x DP1 in place of TP2 x PP2 x DP2; global batch 8 kept'
    """
    check_gpus(gpus, gpus_per_node)
    check_passed(arguments)
    with nullcontext() if run is None else reraise_as_unreadable(run):
        checkpoint = None if run is None else open_checkpoint(run)
        version = (
            version_number(megatron_version) if checkpoint is None else release_of(checkpoint, megatron_version)[0]
        )
        return choose_for(
            checkpoint,
            gpus,
            arguments=arguments,
            gpus_per_node=gpus_per_node,
            gpu_memory=gpu_memory,
            version=version,
            may_change_batch=may_change_batch,
        )


def choose_for(
    checkpoint: CheckpointView | None,
    gpus: int,
    *,
    arguments: Mapping[str, object],
    gpus_per_node: int,
    gpu_memory: int | None,
    version: Version,
    may_change_batch: bool,
) -> ChosenLayout:
    """Choose the layout for an open checkpoint, if there is one; see `choose_layout`.

    The arguments may have names that Megatron does not have, as of a script's own flags.
    """
    if checkpoint is None:
        stated = JobArguments.of(with_virtual_stages(arguments))
        table = table_of_arguments(stated)
    else:
        stated = with_derived_arguments(
            checkpoint, checkpoint.job.arguments().replace(**_stated_arguments(checkpoint, arguments))
        )
        table = table_of(checkpoint, stated)
    job = run_by(stated, version)
    if global_batch_of(job) is None:
        raise UsageError(
            "a job without a global batch size cannot keep it",
            expected="--global-batch-size",
            hint="give it: without it, Megatron derives the batch from the number of GPUs",
        )
    old = ParallelLayout.from_arguments(job)
    request = SearchRequest(gpus, gpus_per_node, version, gpu_memory, recomputation=recomputation_of(job, None))
    buffers = buffers_of(job, table, version)
    result = choose(job, table, old, request, buffers, may_change_batch=may_change_batch)
    if result.chosen is None:
        raise _refusal(result, old, gpus, gpu_memory)
    return _describe(result.chosen, stated, old, gpus)


def _stated_arguments(checkpoint: CheckpointView, arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments that a job states, with what Megatron derives from them.

    Of a job whose sizes are not those of the checkpoint's job, the number of GPUs is unknown.
    """
    if not arguments:
        return {}
    stored = checkpoint.job.arguments()
    stated = with_virtual_stages({**stored.raw, **with_stated_batch(stored, arguments)})
    saved = checkpoint.job.layout
    stated_layout = ParallelLayout.from_arguments(stored.replace(**stated))
    if saved.model_sizes() != stated_layout.model_sizes():
        stated |= {"data_parallel_size": None, "world_size": None}
    return stated


def with_virtual_stages(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return a job's arguments with the virtual stages that Megatron derives from its flags.

    Source: `validate_args` (megatron/training/arguments.py, core_v0.7.0 to 0.19.2).
    """
    values: dict[str, Any] = dict(arguments)
    pipeline = values.get("pipeline_model_parallel_size") or 1
    text = values.get("pipeline_model_parallel_layout")
    pattern = values.get("hybrid_layer_pattern")
    per_stage, stages = (values.get(name) for name in VIRTUAL_STAGE_ARGUMENTS)
    virtual = values.get("virtual_pipeline_model_parallel_size")
    if isinstance(text, str) and (parsed := StageLayout.parse(text)) is not None:
        virtual = len(parsed.stages) // pipeline
    elif isinstance(pattern, str) and (segments := pattern.partition("/")[0].count("|") + 1) > 1:
        virtual = segments // pipeline
    elif stages:
        virtual = stages
    elif per_stage:
        layers = values.get("num_layers") or 0
        layers += sum(bool(values.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
        virtual = layers // pipeline // per_stage
    values["virtual_pipeline_model_parallel_size"] = virtual if virtual and virtual > 1 and pipeline > 1 else None
    return values


def _describe(candidate: FoundLayout, job: JobArguments, old: ParallelLayout, gpus: int) -> ChosenLayout:
    choice = candidate.choice
    layout = choice.layout
    keeps = layout.model_sizes() == old.model_sizes()
    micro, whole = batch_of(choice.job)
    return ChosenLayout(
        gpus=layout.world,
        waiting=gpus - layout.world,
        layout=str(layout),
        flags_layout=str(replace(old, unknown=layout.unknown)),
        is_of_flags=keeps and choice.micro_batch == micro and choice.keeps_global_batch,
        sizes={label: getattr(layout, name) for label, name in PINS.items()} | {"dp": layout.data},
        micro_batch_size=choice.micro_batch,
        global_batch_size=choice.global_batch,
        old_batch_sizes=(micro, whole or choice.global_batch),
        memory=candidate.memory,
        bubble=round(bubble_fraction(choice), 4),
        arguments=MappingProxyType(_arguments(candidate, job, old)),
        flags=" ".join(flags_of(candidate)),
        removed_flags=tuple(removed_flags_of(candidate, job)),
        notes=tuple(notes_of(candidate, job, keeps_grid(layout, old))),
    )


def _arguments(candidate: FoundLayout, job: JobArguments, old: ParallelLayout) -> dict[str, Any]:
    """Return Megatron's arguments before validation: what it derives is left out."""
    choice = candidate.choice
    layout = choice.layout
    derived = {"virtual_pipeline_model_parallel_size", "data_parallel_size"}
    if keeps_schedule(choice):
        derived.add("global_batch_size")
    values = {name: value for name, value in arguments_of(candidate).items() if name not in derived}
    values |= dict.fromkeys(VIRTUAL_STAGE_ARGUMENTS)
    if layout.virtual_pipeline > 1 and not values["pipeline_model_parallel_layout"] and not is_hybrid(job):
        values["num_virtual_stages_per_pipeline_rank"] = layout.virtual_pipeline
    if choice.has_sequence_parallelism:
        values["sequence_parallel"] = True
    if not choice.table.padded_rows.stored and layout.tensor != old.tensor:
        values["make_vocab_size_divisible_by"] = _divisor(job, old, layout)
    return values


def _divisor(job: JobArguments, old: ParallelLayout, layout: ParallelLayout) -> int:
    """Return the divisor that pads a vocabulary of any size as the job's own flags do.

    Raises:
        UnsupportedCheckpointError: no divisor does.
    """
    multiple = (job.make_vocab_size_divisible_by or ROWS_DIVISOR) * old.tensor
    if multiple % layout.tensor:
        raise UnsupportedCheckpointError(
            "the rows of the vocabulary cannot be kept",
            found=f"TP{layout.tensor}",
            expected=f"a divisor of --make-vocab-size-divisible-by x TP = {multiple}",
        )
    return multiple // layout.tensor


def _refusal(
    result: ElasticResult, old: ParallelLayout, gpus: int, gpu_memory: int | None
) -> UnsupportedCheckpointError:
    reasons = list(dict.fromkeys(f"{layout}: {reason}" for layout, reason in result.reasons))
    needed = "" if result.least_memory is None else f"; the smallest needs {format_bytes(result.least_memory)} of a GPU"
    return UnsupportedCheckpointError(
        f"no layout of {quantity(gpus, 'GPU')} keeps the training of {old}",
        found="; ".join(reasons[:_SHOWN]) or "no sizes to try",
        expected=f"a layout that Megatron accepts, with the same global batch{needed}"
        + ("" if gpu_memory is None else f", which has {format_bytes(gpu_memory)}"),
        hint="wait for more nodes (torchrun --nnodes=MIN:MAX: a higher MIN), or allow another global batch",
    )
