"""Detects new tokens, which have no row in the checkpoint; refuses or initializes them.

Megatron lets the number of vocabulary rows differ, because the padding depends on the tensor parallel size, and fills
rows that a checkpoint lacks with zeros (`allow_shape_mismatch`, megatron/core/dist_checkpointing/strategies/torch.py,
core_v0.7.0 to 0.19.2), no matter if they are padding or tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mcore_ckpt_ext.collectives import refusal_text
from mcore_ckpt_ext.errors import ResumeRefusedError, quantity
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.live.model import Chunks, live_parameters
from mcore_ckpt_ext.settings import NEW_TOKENS

_KEEP = f"{NEW_TOKENS.name}=keep"


def token_count(arguments: Any) -> int | None:
    """Return the number of tokens of a running job, without padding.

    Megatron pads its tokenizer's number (`build_tokenizer`, megatron/training/tokenizer/tokenizer.py, core_v0.7.0 to
    0.16.1, megatron/core/tokenizers/utils/build_tokenizer.py, 0.17.0 to 0.19.2), up to `--padded-vocab-size` at most.

    Returns:
        The number; None if neither the tokenizer nor `--vocab-size` gives it.
    """
    tokenizer = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_TOKENIZER", None)
    vocab_size = getattr(tokenizer, "vocab_size", None)
    count = vocab_size if isinstance(vocab_size, int) else JobArguments.of(vars(arguments)).tokens
    rows = getattr(arguments, "padded_vocab_size", None)
    return count if count is None or not isinstance(rows, int) else min(count, rows)


def stored_vocabulary_rows(checkpoint: CheckpointView, arguments: Any) -> int | None:
    """Return the number of vocabulary rows of a checkpoint; None if the job has no tokens beyond them.

    The checkpoint's arguments are cheap to read; its index is parsed only if they do not decide.
    """
    count = token_count(arguments)
    recorded = checkpoint.job.arguments().padded_vocab_size
    if count is None or (recorded is not None and recorded >= count):
        return None
    return vocabulary_rows(checkpoint)


def new_tokens(rows: int | None, arguments: Any) -> range:
    """Return the tokens without a row in a checkpoint with a number of rows.

    Returns:
        The tokens; empty if a number is unknown.
    """
    count = token_count(arguments)
    return range(0) if rows is None or count is None or count <= rows else range(rows, count)


def keeps_initialization() -> bool:
    """Return True if the user accepts new tokens, whose rows keep the model's initialization."""
    return NEW_TOKENS.value


def refusal(tokens: range, where: str, *, can_be_kept: bool = True) -> ResumeRefusedError:
    """Make the error for new tokens that the user does not accept."""
    same = "resume with the tokenizer, or the --vocab-size, that the checkpoint was written with"
    keep = f", or set {_KEEP}: the new rows then keep the model's own initialization, with moments of zero"
    return ResumeRefusedError(
        refusal_text(
            "comparing the vocabularies",
            "the job has tokens without rows in the checkpoint, and their weights would be zero",
        ),
        found=f"{quantity(tokens.start, 'row')} in the checkpoint, padding included; new are {format_tokens(tokens)}",
        expected=f"at most {quantity(tokens.start, 'token')}",
        where=where,
        hint=same + (keep if can_be_kept else ""),
    )


def zeros_message(tokens: range) -> str:
    """Return the log line for weights that stock Megatron loads without an optimizer."""
    return (
        f"the checkpoint has no row for {format_tokens(tokens)}: Megatron sets their weights to zero; with {_KEEP} "
        "they keep the model's own initialization"
    )


def kept_message(tokens: range) -> str:
    """Return the log line for new tokens that the user accepts."""
    return f"new are {format_tokens(tokens)}: their rows keep the model's own initialization"


def format_tokens(tokens: range) -> str:
    """Format token numbers for a message."""
    only = f"token {tokens.start}"
    return only if len(tokens) == 1 else f"tokens {tokens.start} to {tokens.stop - 1}"


@contextmanager
def initialization_kept(chunks: Chunks, tokens: range, optimizer: Any = None) -> Iterator[None]:
    """Load weights within this scope; afterwards the rows of new tokens have their former values.

    Args:
        chunks: the unwrapped model chunks.
        tokens: the tokens without a row in the checkpoint; may be empty.
        optimizer: if given, its masters are made from the weights once more, because the load itself made them from
            weights with zeros (`load_checkpoint`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2).
    """
    rows = list(_rows_of(chunks, tokens)) if tokens else []
    values = [part.clone() for part in rows]
    yield
    with torch.no_grad():
        for part, before in zip(rows, values, strict=True):
            part.copy_(before)
    if tokens and optimizer is not None:
        optimizer.reload_model_params()


def _rows_of(chunks: Chunks, tokens: range) -> Iterator[torch.Tensor]:
    """Yield this rank's rows of tokens, for every parameter that has one row for each token."""
    for live in live_parameters(chunks).values():
        if live.may_pad:
            (region,) = live.regions
            first = region.offsets[0]
            size = region.sizes[0]
            start, stop = (min(max(number - first, 0), size) for number in (tokens.start, tokens.stop))
            if start < stop:
                yield live.parameter.detach()[start:stop]
