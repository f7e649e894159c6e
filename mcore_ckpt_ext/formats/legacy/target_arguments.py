"""Megatron's arguments of the job that will read legacy files; they determine the files' layout."""

from __future__ import annotations

from math import gcd
from typing import Any

from mcore_ckpt_ext.continuity.data_order import changed_history
from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.formats.legacy.options import Legacy
from mcore_ckpt_ext.formats.portable_state import disable_fsdp
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.dimensions import SPLIT_ARGUMENTS, VIRTUAL_STAGE_ARGUMENTS
from mcore_ckpt_ext.job.job_arguments import JobArguments

_SPREADING = (*SPLIT_ARGUMENTS, *VIRTUAL_STAGE_ARGUMENTS)


def reader_arguments(checkpoint: CheckpointView, target: Legacy) -> JobArguments:
    """Return Megatron's arguments of the job that will read: the writer's, with another layout."""
    written = checkpoint.job.arguments()
    source = checkpoint.job.layout
    _check_layout_known(checkpoint, target)
    tensor = target.tensor_model_parallel_size or source.tensor
    vocabulary = target.vocab_size or checkpoint.job.vocabulary()
    pipeline = target.pipeline_model_parallel_size or source.pipeline
    expert = target.expert_model_parallel_size or source.expert
    virtual = target.virtual_pipeline_model_parallel_size
    if virtual is None:
        virtual = source.virtual_pipeline if pipeline == source.pipeline else 1
    ranks = tensor * pipeline * source.context
    # The world size is a multiple of TP x PP x CP and of ETP x EP x PP, with ETP = TP.
    step = expert // gcd(expert, source.context)
    data = max(1, source.world // ranks // step) * step
    changes: dict[str, Any] = {}
    if pipeline != source.pipeline:
        changes |= {name: None for name in _SPREADING if written.is_set(name)}
    changes |= {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "transformer_pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": tensor,
        "data_parallel_size": data,
        "world_size": ranks * data,
        "padded_vocab_size": _padded_vocabulary(checkpoint, tensor, vocabulary),
        "ckpt_format": "torch",
        "use_dist_ckpt": False,
        "use_distributed_optimizer": not (
            checkpoint.optimizer.format() and checkpoint.optimizer.chained_optimizer_settings()
        ),
        **disable_fsdp(written),
    }
    reader = written.replace(**changes)
    return reader.replace(**changed_history(written, reader))


def _check_layout_known(checkpoint: CheckpointView, target: Legacy) -> None:
    """Refuse to take a size from a source that does not record it.

    Raises:
        UsageError: neither the source nor the user defines a size.
    """
    open_sizes = {
        "tensor": target.tensor_model_parallel_size,
        "pipeline": target.pipeline_model_parallel_size,
        "expert": target.expert_model_parallel_size,
    }
    missing = [name for name, size in open_sizes.items() if size is None and name in checkpoint.job.layout.unknown]
    if missing:
        raise UsageError(
            "the layout to write is unknown, because the source does not record its own",
            expected=", ".join(f"--{name}-model-parallel-size" for name in missing),
            where=str(checkpoint.files.folder),
            hint="pass these options",
        )


def _padded_vocabulary(checkpoint: CheckpointView, tensor: int, vocabulary: int | None) -> int:
    """Return the embedding's rows, including padding.

    Source: `_vocab_size_with_padding` (megatron/training/tokenizer/tokenizer.py, 0.7 to 0.19).

    No checkpoint records the size without padding. If the user does not pass it, the stored number of rows is kept, or
    padded further if it is not divisible.
    """
    multiple = (checkpoint.job.arguments().make_vocab_size_divisible_by or 128) * tensor
    stored = vocabulary_rows(checkpoint) or checkpoint.job.arguments().whole("padded_vocab_size")
    if vocabulary is None:
        return stored if stored % tensor == 0 else -(-stored // multiple) * multiple
    return -(-vocabulary // multiple) * multiple
