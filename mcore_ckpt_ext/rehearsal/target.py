"""The resuming job: the layout that the user names, Megatron's rules for it, and the job's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.continuity.batch_sizes import run_by
from mcore_ckpt_ext.errors import UsageError, shorten
from mcore_ckpt_ext.families.passed_arguments import check_values
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.dimensions import PINS, with_defaults
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.layer_form import LAYER_FORM, check_layer_form
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.options import parse_sizes
from mcore_ckpt_ext.layout_choice.padded_rows import ROWS_DIVISOR, PaddedRows
from mcore_ckpt_ext.operations.layout_flags import arguments_of, flags_of, keeps_grid, notes_of, removed_flags_of
from mcore_ckpt_ext.operations.layout_rules import search_sizes
from mcore_ckpt_ext.rehearsal.scheduler import check_schedule
from mcore_ckpt_ext.versions import Version

OTHER_OPTIMIZERS = ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
"""Modes of Megatron with optimizers of their own, which a rehearsal does not simulate."""
CHANGEABLE = frozenset(
    {
        "bf16",
        "fp16",
        "padded_vocab_size",
        "vocab_size",
        "make_vocab_size_divisible_by",
        "overlap_grad_reduce",
        "ddp_bucket_size",
        "ddp_num_buckets",
        "lr",
        "min_lr",
        "lr_decay_style",
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
        "use_distributed_optimizer",
        "use_precision_aware_optimizer",
        "main_params_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "decoupled_lr",
        "decoupled_min_lr",
        "weight_decay",
        "start_weight_decay",
        "end_weight_decay",
        "weight_decay_incr_style",
        "hybrid_layer_pattern",
        *LAYER_FORM,
    }
)
"""Arguments, other than the layout, that may differ from those of the job that wrote the checkpoint.

Model arguments are excluded, because they change the shapes of parameters, which a rehearsal takes from the checkpoint.
"""


def sizes_in(text: str) -> dict[str, int]:
    """Parse the sizes of a layout, by their names in `ParallelLayout`.

    Args:
        text: for example `tp=8 pp=8 ep=4`; omitted sizes are Megatron's defaults: 1, for ETP the size of TP.

    Raises:
        UsageError: the text has another form.
    """
    sizes = {PINS[label]: size for label, size in parse_sizes(text).items()}
    if not sizes:
        raise UsageError("the layout to rehearse is empty", expected="tp=8 pp=8")
    return with_defaults(sizes)


def check_changes(changes: Mapping[str, Any]) -> None:
    """Refuse arguments that a rehearsal cannot change, and values that no job can have.

    Raises:
        UsageError: there is such an argument, or such a value.
    """
    if unknown := sorted(changes.keys() - CHANGEABLE):
        raise UsageError(
            "this argument cannot be changed in a rehearsal",
            found=shorten(unknown[0], 60),
            expected=", ".join(sorted(CHANGEABLE)),
        )
    check_values(changes, "--change")


@dataclass(frozen=True)
class TargetJob:
    """The job that resumes.

    Attributes:
        flags: flags for its command line.
        removed_flags: flags of the old job that contradict these.
        notes: changes for the user.
        refused: why Megatron does not accept the layout; None if it does.
    """

    arguments: JobArguments
    layout: ParallelLayout
    flags: str = ""
    removed_flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    refused: str | None = None


def target_job(
    checkpoint: CheckpointView,
    written: JobArguments,
    gpus: int,
    sizes: Mapping[str, int],
    version: Version,
    changes: Mapping[str, Any],
) -> TargetJob:
    """Return the job of a checkpoint under another layout.

    Args:
        checkpoint: the checkpoint that it resumes.
        written: the arguments of the job that wrote it.
        gpus: number of ranks.
        sizes: the size of each dimension, by its name in `ParallelLayout`.
        version: Megatron's version.
        changes: arguments that differ, other than the layout.

    Raises:
        UnsupportedCheckpointError: the checkpoint does not describe its model sufficiently.
        UsageError: the changes contradict each other, or describe another model.
    """
    check_layer_form(written, changes)
    _check_together({**written.raw, **changes}, changes)
    # The job is one with optimizers that a rehearsal can simulate.
    simulated: dict[str, Any] = dict.fromkeys(OTHER_OPTIMIZERS, False)
    model = run_by(_with_stages_of(written, changes).replace(**simulated), version)
    result = search_sizes(checkpoint, written, model, gpus, sizes, version)
    if (refusal := result.refusal) is not None:
        return TargetJob(written, refusal.layout, refused=refusal.reason)
    best = result.found[0]
    changed = arguments_of(best, changes)
    changed.setdefault("padded_vocab_size", _rows(checkpoint, written.replace(**changed), sizes["tensor"]))
    running = run_by(written.replace(source="the arguments of the job that resumes", **changed), version)
    layout = ParallelLayout.from_arguments(running)
    return TargetJob(
        running,
        layout,
        " ".join(flags_of(best, changes)),
        tuple(removed_flags_of(best, written)),
        tuple(notes_of(best, written, keeps_grid(layout, ParallelLayout.from_arguments(written)))),
    )


_EXCLUSIVE = {
    "Megatron takes the learning rate schedule of the command line, or that of the checkpoint": (
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        "for example --change override_opt_param_scheduler=false use_checkpoint_opt_param_scheduler=true",
    ),
    "Megatron computes in bf16 or in fp16": (("bf16", "fp16"), "for example --change bf16=true fp16=false"),
    "Megatron takes the number of buckets or their size": (
        ("ddp_num_buckets", "ddp_bucket_size"),
        "for example --change ddp_num_buckets=None ddp_bucket_size=40000000",
    ),
}
"""Arguments of which Megatron accepts one, by the refusal, with a way out.

Sources: the assertions of `OptimizerParamScheduler.__init__` (megatron/core/optimizer_param_scheduler.py),
`validate_args` (megatron/training/arguments.py), `get_model` (megatron/training/training.py, core_v0.16.1) and
`DistributedDataParallelConfig.__post_init__` (core_v0.19.2).
"""

_NEEDED = {
    "main_params_dtype": "use_precision_aware_optimizer",
    "exp_avg_dtype": "use_precision_aware_optimizer",
    "exp_avg_sq_dtype": "use_precision_aware_optimizer",
    "optimizer_cpu_offload": "use_precision_aware_optimizer",
    "use_precision_aware_optimizer": "use_distributed_optimizer",
}
"""Arguments that need another one, unless they have a value of `_DEFAULTS`.

Sources: the assertions of `OptimizerConfig.__post_init__` (megatron/core/optimizer/optimizer_config.py) and
`validate_args`, core_v0.16.1 to the development head of November 2026, and there `get_megatron_optimizer`.
"""
_DEFAULTS = ("None", "False", "fp32", "torch.float32")


def _check_together(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuse arguments that contradict each other.

    Args:
        settings: the arguments of the resuming job.
        changes: those that differ from the job that wrote the checkpoint.

    Raises:
        UsageError: Megatron accepts one of two that are set, or no such schedule.
    """
    for refusal, (names, hint) in _EXCLUSIVE.items():
        if all(settings.get(name) for name in names):
            raise UsageError(refusal, found=" and ".join(names), expected="one of them", hint=hint)
    for name, needed in _NEEDED.items():
        is_changed = name in changes or needed in changes
        if is_changed and str(settings.get(name)) not in _DEFAULTS and not settings.get(needed):
            raise UsageError(
                f"Megatron accepts this argument only with --{needed.replace('_', '-')}",
                found=name,
                hint=f"--change {name}={changes.get(name, settings[name])} {needed}=true",
            )
    check_schedule(settings, changes)


def _with_stages_of(written: JobArguments, changes: Mapping[str, Any]) -> JobArguments:
    """Return the writing job's arguments, with the resuming job's pattern of hybrid layers.

    Raises:
        UsageError: the pattern belongs to another model.
    """
    pattern = changes.get("hybrid_layer_pattern")
    stored = written.hybrid_layer_pattern
    if pattern is None or stored is None:
        return written
    if str(pattern).replace("|", "") != stored.replace("|", ""):
        raise UsageError(
            "a rehearsal resumes the checkpoint's own model, and this pattern has other layers",
            found=shorten(str(pattern), 60),
            expected=f"{shorten(stored, 60)}, divided otherwise by |",
        )
    return written.replace(hybrid_layer_pattern=pattern)


def _rows(checkpoint: CheckpointView, running: JobArguments, tensor: int) -> int | None:
    """Return the rows of the vocabulary with the job's padding; None for a model without a vocabulary."""
    stored = vocabulary_rows(checkpoint)
    tokens = running.tokens or checkpoint.job.tokens
    if stored is None:
        return running.padded_vocab_size
    return PaddedRows(tokens, stored, running.make_vocab_size_divisible_by or ROWS_DIVISOR).with_own_divisor(tensor)
