"""Starts a job from a Hugging Face folder, which `sources.huggingface` presents to Megatron."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import agree, is_first_rank
from mcore_ckpt_ext.errors import CheckpointError, quantity, with_indefinite_article
from mcore_ckpt_ext.families.config_keys import accept_keys
from mcore_ckpt_ext.families.forward_pass import notes_on
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import complete
from mcore_ckpt_ext.megatron.live.model import Chunks
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.new_tokens import (
    initialization_kept,
    keeps_initialization,
    kept_message,
    new_tokens,
    refusal,
)
from mcore_ckpt_ext.megatron.sources.huggingface import check_arguments, check_vocabulary, open_for_job
from mcore_ckpt_ext.megatron.sources.legacy_state_dict import present
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import Scope, overridden
from mcore_ckpt_ext.settings import ACCEPT_KEYS


def start_from(scope: Scope, folder: Path, chunks: Chunks, optimizer: Any, stock: Callable[[], Any]) -> Any:
    """Load this rank's part of a Hugging Face folder by stock Megatron's function. Collective.

    Args:
        scope: the globals of Megatron's checkpointing module.
        folder: the folder, on every rank.
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer, whose masters are made of the weights; or None.
        stock: calls the original with all its arguments.

    Raises:
        ResumeRefusedError: on every rank, if the folder and the model do not match, or the folder is unreadable.
    """
    arguments = scope["get_args"]()
    agree("comparing the arguments with config.json", lambda: check_arguments(arguments))
    new = agree("comparing the vocabularies", lambda: _new_tokens(folder, arguments), "nothing is loaded")[0]
    left_out: list[str] = []
    registered: set[str] = set()

    def open_view(live: set[str]) -> CheckpointView:
        checkpoint = open_for_job(folder, arguments)
        if checkpoint.family.origin:
            registered.add(f", {with_indefinite_article(checkpoint.family.described)}")
        if checkpoint.has_mtp and not any(name.startswith("mtp.") for name in live):
            with accept_keys(ACCEPT_KEYS.choose(arguments)):
                checkpoint = checkpoint.without_mtp()
            left_out.append("MTP layers, which this job does not have (--mtp-num-layers)")
        check_vocabulary(checkpoint, chunks)
        if checkpoint.left_out:
            left_out.append(f"{quantity(len(checkpoint.left_out), 'tensor')} without an equivalent in Megatron")
        return checkpoint.view

    exists = overridden(scope, checkpoint_exists=lambda path: path is not None and Path(path) == folder)
    with exists, present(scope, LoadSession(folder), chunks, open_view), initialization_kept(chunks, new, optimizer):
        result = stock()
    grown = f"; {kept_message(new)}" if new else ""
    left = f"; left out: {'; '.join(left_out)}" if left_out else ""
    of_family = "".join(registered)
    announce(f"training starts from the weights of the Hugging Face folder {folder}{of_family}{left}{grown}")
    for line in notes_on(complete(JobArguments.of(vars(arguments)))):
        announce(f"unlike in the Hugging Face model, {line}")
    return result


def _new_tokens(folder: Path, arguments: Any) -> range:
    """Return the job's tokens without a row in the folder, on rank 0; empty on other ranks.

    Raises:
        ResumeRefusedError: there are such tokens, and the user does not accept them.
    """
    rows: list[int] = []
    if is_first_rank():
        with suppress(CheckpointError, OSError):  # the load itself reports errors of the folder
            rows.append(open_for_job(folder, arguments).vocabulary)
    tokens = new_tokens(rows[0] if rows else None, arguments)
    if tokens and not keeps_initialization():
        raise refusal(tokens, str(folder))
    return tokens
