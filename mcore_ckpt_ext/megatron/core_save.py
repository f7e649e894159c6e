"""Wraps `dist_checkpointing.save` to write sidecars for training loops other than Megatron's.

In Megatron's own loop the coordinator writes them. Source: `save`, and `AsyncRequest.add_finalize_fn`
(megatron/core/dist_checkpointing/serialization.py, strategies/async_utils.py, core_v0.12.1 to 0.19.2).
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import gather, is_first_rank
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from mcore_ckpt_ext.megatron.live.arguments import chunks_of, live_arguments
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain
from mcore_ckpt_ext.megatron.live.sidecar_writer import packing_recorder
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.patch_point import Function
from mcore_ckpt_ext.patching.reentrancy import ReentrancyGuard
from mcore_ckpt_ext.patching.singletons import PROCESS


class PendingSave:
    """The optimizer whose sharded state dict was requested last, and the identity of that dict.

    The dict is saved unchanged, so it cannot be marked, and it is not kept alive.
    """

    def __init__(self) -> None:
        self._optimizer: Callable[[], Any] = lambda: None
        self._state_dict_id = 0

    def note(self, optimizer: Any, state_dict: object) -> None:
        """Record the sharded state dict of an optimizer."""
        self._optimizer = weakref.ref(optimizer)
        self._state_dict_id = id(state_dict)

    def found_in(self, tree: Any) -> Any:
        """Return the optimizer whose sharded state dict is part of a state dict; None if there is none."""
        return self._optimizer() if self._is_in(tree) else None

    def _is_in(self, tree: Any) -> bool:
        if not isinstance(tree, dict):
            return False
        return id(tree) == self._state_dict_id or any(self._is_in(value) for value in tree.values())


def wrap_save(original: Function) -> Function:
    """Wrap `dist_checkpointing.save`: also write the packing of the gradient buffers into the folder."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(*positional: Any, **keywords: Any) -> Any:
        call = signature.bind(*positional, **keywords).arguments
        tree = call["sharded_state_dict"]
        folder = str(call["checkpoint_dir"])
        optimizer = PROCESS.one(PendingSave).found_in(tree)
        is_partial = call.get("process_group") is not None
        if is_partial or PROCESS.one(ReentrancyGuard).is_busy or "://" in folder or not _all_save(optimizer, folder):
            return original(*positional, **keywords)
        text = _text(optimizer, tree.get("iteration", 0))
        if is_first_rank():  # the sidecar of the previous save, which is overwritten
            Disk().remove(Path(folder) / FILE_NAME)
        request = original(*positional, **keywords)
        publish = functools.partial(_publish, Path(folder), text)
        if request is None:
            publish()
        else:
            request.add_finalize_fn(publish)
        return request

    return save


def _all_save(optimizer: Any, folder: str) -> bool:
    """Return True if every rank saves an optimizer; a rank that trains no parameter has none. Collective."""
    saving = gather(optimizer is not None)
    if any(saving) and not all(saving):
        announce(
            f"no sidecar in {folder}: a rank has no optimizer; mcore_ckpt_ext.save_sidecar writes one all the same"
        )
    return all(saving)


def _text(optimizer: Any, iteration: object) -> str:
    """Return the sidecar's text; empty if it cannot be made. Collective."""
    if not Chain.of(optimizer).distributed:
        return ""
    chunks = functools.partial(chunks_of, optimizer)
    settings = live_arguments(chunks(), optimizer).raw
    return packing_recorder().text(chunks, optimizer, settings, iteration if isinstance(iteration, int) else 0)


def _publish(folder: Path, text: str) -> None:
    """Write the sidecar; a failure is only logged, since the checkpoint is complete without it."""
    if not text or not is_first_rank():
        return
    try:
        Disk().publish(folder, text, None, "")
    except OSError as error:
        announce(f"no sidecar in {folder}: {error}; a resume will recover the packing instead")
