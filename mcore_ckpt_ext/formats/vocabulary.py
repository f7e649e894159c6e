"""The rows of a checkpoint's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt_ext.model_space.anatomy import word_embeddings_in
from mcore_ckpt_ext.model_space.tensors import WEIGHT

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.view import CheckpointView


def vocabulary_rows(checkpoint: CheckpointView) -> int | None:
    """Return the stored rows of the vocabulary with padding, which take precedence over the arguments.

    Release checkpoints may be unpadded; then the padded size is taken from the arguments.
    """
    recorded, table = checkpoint.arguments.padded_vocab_size, word_embeddings_in(checkpoint.names(WEIGHT))
    tensor = checkpoint.logical_tensor(WEIGHT, table) if table else None
    if tensor is None:
        return recorded
    rows, multiple = tensor.shape[0], checkpoint.arguments.make_vocab_size_divisible_by or 1
    return recorded if checkpoint.is_release and recorded == -(-rows // multiple) * multiple else rows


def vocabulary_contradiction(checkpoint: CheckpointView) -> str | None:
    """Return a contradiction between the arguments and the vocabulary's rows; None if they agree."""
    recorded, rows = checkpoint.arguments.padded_vocab_size, checkpoint.vocabulary_rows
    if recorded is None or recorded == rows:
        return None
    return f"the arguments say padded_vocab_size {recorded}, but the vocabulary has {rows} rows, which are used"
