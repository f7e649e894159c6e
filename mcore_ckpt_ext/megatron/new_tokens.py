"""Tokens of the running job that a checkpoint holds no row for: found, refused, or initialized as in a fresh model.

Megatron lets the rows of the vocabulary differ, because its padding depends on the tensor parallel size, and fills rows
that a checkpoint lacks with zeros (`allow_shape_mismatch`, megatron/core/dist_checkpointing/strategies/torch.py,
core_v0.7.0 to 0.19.2). It does so whether they are padding or tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt_ext.collectives import refusal_text
from mcore_ckpt_ext.errors import ResumeRefusedError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.live.model import live_parameters
from mcore_ckpt_ext.settings import NEW_TOKENS

_TOKENIZER = ("megatron.training.global_vars", "_GLOBAL_TOKENIZER")
_KEEP = f"{NEW_TOKENS.name}=keep"


def token_count(arguments: Any) -> int | None:
    """The number of tokens of a running job, without padding.

    Megatron pads what its tokenizer says (`build_tokenizer`, megatron/training/tokenizer/tokenizer.py, core_v0.7.0 to
    0.16.1, megatron/core/tokenizers/utils/build_tokenizer.py, 0.17.0 to 0.19.2), and no further than
    `--padded-vocab-size`.

    Returns:
        None where neither the tokenizer nor `--vocab-size` gives it.
    """
    tokenizer = getattr(sys.modules.get(_TOKENIZER[0]), _TOKENIZER[1], None)
    found = getattr(tokenizer, "vocab_size", None)
    count = found if isinstance(found, int) else JobArguments.of(vars(arguments)).tokens
    rows = getattr(arguments, "padded_vocab_size", None)
    return count if count is None or not isinstance(rows, int) else min(count, rows)


def stored_vocabulary_rows(folder: Path, arguments: Any) -> int | None:
    """The rows of a checkpoint's vocabulary, where a job may have tokens beyond them; None where it has not.

    The arguments of a checkpoint cost next to nothing to read: its index is parsed only where they leave a doubt.
    """
    count, checkpoint = token_count(arguments), open_checkpoint(folder)
    stated = checkpoint.arguments.padded_vocab_size
    if count is None or (stated is not None and stated >= count):
        return None
    return checkpoint.vocabulary_rows


def new_tokens(rows: int | None, arguments: Any) -> range:
    """The tokens of a running job that have no row in a checkpoint of so many rows; empty where that is not known."""
    count = token_count(arguments)
    return range(0) if rows is None or count is None or count <= rows else range(rows, count)


def keeps_initialization() -> bool:
    """Whether new tokens are accepted: their rows keep the values that the model was initialized with."""
    return NEW_TOKENS.value


def refusal(tokens: range, where: str, *, can_be_kept: bool = True) -> ResumeRefusedError:
    """The error for new tokens that were not accepted."""
    same = "resume with the tokenizer, or the --vocab-size, that the checkpoint was written with"
    keep = f", or set {_KEEP}: the new rows then keep the model's own initialization, with moments of zero"
    return ResumeRefusedError(
        refusal_text(
            "comparing the vocabularies",
            "the job has tokens without rows in the checkpoint, and their weights would be zero",
        ),
        found=f"{tokens.start} rows in the checkpoint, padding included; new are {described(tokens)}",
        expected=f"at most {tokens.start} tokens",
        where=where,
        hint=same + (keep if can_be_kept else ""),
    )


def zeros_message(tokens: range) -> str:
    """The line for weights that stock Megatron loads without an optimizer."""
    return (
        f"the checkpoint has no row for {described(tokens)}: Megatron sets their weights to zero; with {_KEEP} they "
        "keep the model's own initialization"
    )


def kept_message(tokens: range) -> str:
    """The log line for new tokens that were accepted."""
    return f"new are {described(tokens)}: their rows keep the model's own initialization"


def described(tokens: range) -> str:
    """Token numbers in a message."""
    only = f"token {tokens.start}"
    return only if len(tokens) == 1 else f"tokens {tokens.start} to {tokens.stop - 1}"


@contextmanager
def initialization_kept(chunks: Sequence[Any], tokens: range, optimizer: Any = None) -> Iterator[None]:
    """Within this scope weights are loaded; afterwards the rows of new tokens are what they were before.

    Args:
        chunks: the unwrapped model chunks.
        tokens: those that the checkpoint has no row for; may be empty.
        optimizer: where the load makes its masters of the weights, as of weights alone, it makes them anew
            (`load_checkpoint`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2).
    """
    rows = list(_rows_of(chunks, tokens)) if tokens else []
    values = [one.clone() for one in rows]
    yield
    with torch.no_grad():
        for own, before in zip(rows, values, strict=True):
            own.copy_(before)
    if tokens and optimizer is not None:
        optimizer.reload_model_params()


def _rows_of(chunks: Sequence[Any], tokens: range) -> Iterator[torch.Tensor]:
    """This rank's rows of tokens, of every parameter that has one row for each token."""
    for live in live_parameters(chunks).values():
        if live.may_pad:
            (region,) = live.regions
            first, size = region.offsets[0], region.sizes[0]
            start, stop = (min(max(number - first, 0), size) for number in (tokens.start, tokens.stop))
            if start < stop:
                yield live.parameter.detach()[start:stop]
