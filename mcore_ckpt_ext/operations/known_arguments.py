"""Derives a checkpoint's missing arguments from its tensors, and lists those that stay unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizers.table import encodings_named
from mcore_ckpt_ext.planning.plan import named_tensor

_NEEDED: Sequence[str] = (
    "num_layers",
    "num_attention_heads",
    "hidden_size",
    "seq_length",
    "global_batch_size",
    "micro_batch_size",
    "make_vocab_size_divisible_by",
)


def with_derived_arguments(checkpoint: CheckpointView, job: JobArguments) -> JobArguments:
    """Return a job's arguments, with precision and kind of optimizer by the stored tensors if not set.

    Args:
        checkpoint: the checkpoint with the tensors.
        job: the arguments of the checkpoint and of the user.
    """
    derived: dict[str, Any] = {}
    if not (job.is_set("bf16") or job.is_set("fp16")):
        dtypes = {named_tensor(checkpoint, WEIGHT, name).dtype for name in checkpoint.names(WEIGHT)}
        derived = {"bf16": "bfloat16" in dtypes, "fp16": "float16" in dtypes}
    encodings = encodings_named(checkpoint.optimizer.format())
    if encodings and not job.is_set("use_distributed_optimizer"):
        derived["use_distributed_optimizer"] = any(encoding.distributed for encoding in encodings)
    return job.replace(**derived) if derived else job


def unknown_arguments(job: JobArguments) -> tuple[str, ...]:
    """Return the names of unset arguments that a plan uses."""
    return tuple(name for name in _NEEDED if not job.is_set(name))
