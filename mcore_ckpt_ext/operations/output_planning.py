"""Plans the output of a conversion: from a source and a target to files, records and notes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.formats.laid_out import OutputPlan
from mcore_ckpt_ext.formats.registry import format_written
from mcore_ckpt_ext.formats.steps import check_step
from mcore_ckpt_ext.formats.target import Target, version_number
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.layout_choice.expert_rules import undivided_experts
from mcore_ckpt_ext.model_space.adapters import is_adapter
from mcore_ckpt_ext.model_space.names import is_of_experts
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.layout_rules import check_files, refused_layout

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family


def lay_out(checkpoint: CheckpointView, target: Target, family: Family | None) -> OutputPlan:
    """Plan the files of a conversion.

    Raises:
        UnsupportedCheckpointError: the format cannot hold this checkpoint, or Megatron refuses the layout.
    """
    _check_vocabulary(checkpoint, target.vocab_size)
    if not target.is_model_folder:
        _check_experts(checkpoint, target.expert_model_parallel_size)
        check_step(checkpoint)
    written = format_written(target)
    holds_model = not any(map(is_adapter, checkpoint.names(WEIGHT)))
    if holds_model and (job := written.arguments_of_reader(checkpoint, target)) is not None:
        check_files(checkpoint, job, version_number(target.megatron_version))
    return written.lay_out(checkpoint, target, family)


def _check_vocabulary(checkpoint: CheckpointView, requested: int | None) -> None:
    """Refuse a vocabulary that would lose tokens of the source, or add tokens that it does not have.

    Raises:
        UsageError: the vocabulary is too small or too large.
    """
    if requested is not None and requested < (checkpoint.job.tokens or 0):
        raise UsageError(
            "the vocabulary would lose tokens",
            found=f"--vocab-size {requested}",
            expected=f"{checkpoint.job.tokens} or more: the number of tokens recorded in the source",
            where=str(checkpoint.files.folder),
            hint="leave the option out",
        )
    if requested is not None and requested > (vocabulary_rows(checkpoint) or requested):
        raise UsageError(
            "the vocabulary has fewer rows than that: the other tokens would be zeros",
            found=f"--vocab-size {requested}",
            expected=f"{vocabulary_rows(checkpoint)} or less",
            where=str(checkpoint.files.folder),
            hint="pass the tokenizer's own size; Megatron's padding is added",
        )


def _check_experts(checkpoint: CheckpointView, requested: int | None) -> None:
    """Refuse expert parallelism that the model's experts do not allow.

    Raises:
        UsageError: the model has no experts.
        UnsupportedCheckpointError: the ranks cannot have equally many of them.
    """
    if requested is not None and requested > 1 and not any(map(is_of_experts, checkpoint.names(WEIGHT))):
        raise UsageError(
            "the model has no experts to distribute over expert-parallel ranks",
            found=f"--expert-model-parallel-size {requested}",
            where=str(checkpoint.files.folder),
            hint="leave the option out",
        )
    experts = checkpoint.job.arguments().num_experts
    if requested is not None and experts and (reason := undivided_experts(experts, requested)):
        raise refused_layout(checkpoint, reason)
