"""The rows of a checkpoint's vocabulary, which take precedence over its arguments."""

from __future__ import annotations

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.model_space.anatomy import word_embeddings_in
from mcore_ckpt_ext.model_space.tensors import WEIGHT


def vocabulary_rows(checkpoint: CheckpointView) -> int | None:
    """Return the stored rows of the vocabulary with padding.

    Release checkpoints may be unpadded; then the padded size is taken from the arguments.
    """
    arguments = checkpoint.job.arguments()
    recorded = arguments.padded_vocab_size
    table = word_embeddings_in(checkpoint.names(WEIGHT))
    tensor = checkpoint.logical_tensor(WEIGHT, table) if table else None
    if tensor is None:
        return recorded
    rows = tensor.shape[0]
    multiple = arguments.make_vocab_size_divisible_by or 1
    return recorded if checkpoint.job.is_release and recorded == -(-rows // multiple) * multiple else rows


def vocabulary_contradiction(checkpoint: CheckpointView) -> str | None:
    """Return a contradiction between the arguments and the vocabulary's rows; None if they agree."""
    recorded = checkpoint.job.arguments().padded_vocab_size
    rows = vocabulary_rows(checkpoint)
    if recorded is None or recorded == rows:
        return None
    stored = quantity(rows or 0, "row")
    return f"the arguments say padded_vocab_size {recorded}, but the vocabulary has {stored}, which are used"
