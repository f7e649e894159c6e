"""Protects masters loaded with the optimizer from a later load of the model's rounded file."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_NOTE = "_mcore_ckpt_ext_brought"


class _LoadedMasters:
    """A record of masters from an optimizer's file, which the optimizer's next step makes void.

    torch itself calls the hook (torch/optim/optimizer.py: ``profile_hook_step``). The states of SGD and others do not
    count steps.
    """

    def __init__(self, optimizer: Any, prepare_step: Callable[[], object]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._prepare_step = prepare_step
        self._is_current = True
        self._hook = optimizer.optim.register_step_pre_hook(self._void)

    def _void(self, *_: object) -> None:
        if self._is_current:
            self._prepare_step()
        self._is_current = False

    def is_valid(self) -> bool:
        return self._is_current and self._optimizer() is not None

    def remove(self) -> None:
        self._hook.remove()


def note_exact_masters(owner: Any, optimizer: Any, prepare_step: Callable[[], object] = lambda: None) -> None:
    """Record in a wrapper that its masters come from the optimizer's file; the next step makes this void.

    Before that step, `prepare_step` is called.
    """
    if (former := vars(owner).get(_NOTE)) is not None:
        former.remove()
    vars(owner)[_NOTE] = _LoadedMasters(optimizer, prepare_step)


def has_exact_masters(owner: Any) -> bool:
    """Return True if the masters are still those of the optimizer's file."""
    note: _LoadedMasters | None = vars(owner).get(_NOTE)
    return note is not None and note.is_valid()
