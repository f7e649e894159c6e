"""Loads weights without an optimizer; files that Megatron cannot read are presented to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import agree
from mcore_ckpt_ext.megatron.live.model import Chunks
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.presentation import reasons_to_present, session_to_present
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.sources.legacy_state_dict import present
from mcore_ckpt_ext.patching.overrides import Scope


def load_weights_alone(
    scope: Scope, session: LoadSession, directory: str | None, chunks: Chunks, stock: Callable[[], Any]
) -> tuple[Any, str]:
    """Load without the optimizer by stock Megatron's function; present the checkpoint to it if necessary.

    Returns:
        The result of `stock`, which calls the original, and a summary; empty if stock Megatron has read the files.

    Raises:
        ResumeRefusedError: on every rank, if some rank's part is unavailable.
    """
    arguments = scope["get_args"]()

    def inspect_here() -> Path | None:
        nonlocal session
        presentable = session_to_present(directory, arguments, session)
        if presentable is None:
            return None
        session = presentable
        return session.folder if reasons_to_present(session, arguments, megatron_version()) else None

    folder = agree("looking at the checkpoint", inspect_here)[0]
    if folder is None:
        return stock(), ""
    session = session.with_folder(folder)
    with present(scope, session, chunks):
        result = stock()
    checkpoint = session.checkpoint
    form = "legacy" if checkpoint.format.loading.by_rank else checkpoint.format.name
    return result, f"weights of the {form} checkpoint {folder} divided for the running layout"
