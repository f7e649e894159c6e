"""Functions for your own training loop: fill an optimizer, and write the sidecar of a save."""

from __future__ import annotations

import os
from pathlib import Path

from mcore_ckpt_ext.collectives import agree, agree_here, is_first_rank
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from mcore_ckpt_ext.megatron.live.arguments import live_arguments, unwrap_model
from mcore_ckpt_ext.megatron.live.resume import ResumeOptions
from mcore_ckpt_ext.megatron.live.sidecar_writer import packing_recorder
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.optimizer_reshard import prepare
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.settings import ACCEPT_LOST, READ_ONCE, VERIFY_ALL

_NONE = "no sidecar is written"


def load_optimizer(path: str | os.PathLike[str], model: object, optimizer: object) -> dict[str, object] | None:
    """Fill a live Megatron Core optimizer from a checkpoint of any other layout. Collective.

    Load the checkpoint's weights into the model first: every master is compared with its weight before anything is
    written.

    Args:
        path: a run folder (its newest iteration is taken) or an iteration folder.
        model: the model, or the list of its chunks, wrapped or not.
        optimizer: the result of `get_megatron_optimizer`.

    Returns:
        The stored state of the scheduler, for its `load_state_dict`; None if the checkpoint has none.

    Raises:
        ResumeRefusedError: on every rank, if some rank cannot resume; the optimizer is unchanged.

    Example:
        >>> try:
        ...     load_optimizer("nowhere", model=[], optimizer=None)
        ... except ResumeRefusedError:
        ...     print("on every rank alike")
        on every rank alike
    """
    chunks = unwrap_model(model)
    running = agree_here("reading the live model", lambda: live_arguments(chunks, optimizer))
    options = ResumeOptions(VERIFY_ALL.value, ACCEPT_LOST.value, READ_ONCE.value)
    prepared = prepare(LoadSession(Path(os.fspath(path))), chunks, optimizer, running, options)
    announce(str(prepared.prove().fill()))
    return None if prepared.schedule is None else dict(prepared.schedule)


def save_sidecar(path: str | os.PathLike[str], model: object, optimizer: object) -> None:
    """Write the sidecar of a checkpoint that has just been saved. Collective.

    The sidecar records how the gradient buffers are packed: with it, a later resume under another layout need not
    recover the packing. Call this function after the save is complete and before the next optimizer step.

    Args:
        path: the iteration folder.
        model: the model, or the list of its chunks, wrapped or not.
        optimizer: the optimizer that was saved.

    Raises:
        ResumeRefusedError: on every rank, if the folder is no checkpoint or cannot be written.

    Example:
        >>> try:
        ...     save_sidecar("nowhere", model=[], optimizer=None)
        ... except ResumeRefusedError as refusal:
        ...     print(str(refusal).splitlines()[0])
        mcore_ckpt_ext refused while looking at the checkpoint; no sidecar is written
    """
    folder = Path(os.fspath(path))
    chunks = unwrap_model(model)
    iteration = agree("looking at the checkpoint", lambda: LoadSession(folder).checkpoint.job.iteration(), _NONE)[0]
    settings = live_arguments(chunks, optimizer).raw
    text = packing_recorder().text(lambda: chunks, optimizer, settings, iteration)

    def write() -> None:
        if text and is_first_rank():
            Disk().publish(folder, text, None, "")

    agree(f"writing {FILE_NAME}", write, _NONE)
