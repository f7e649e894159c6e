"""What an optimizer's file has brought into the masters stays, even if the model's rounded file is loaded after it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

_NOTE = "_mcore_ckpt_ext_brought"


class _LoadedMasters(NamedTuple):
    optimizer: Any
    steps: tuple[int, ...]


def note_exact_masters(optimizer: Any) -> None:
    """Note that the masters are those of the optimizer's file, until training changes them."""
    vars(optimizer.module)[_NOTE] = _LoadedMasters(weakref.ref(optimizer), _steps(optimizer))


def has_exact_masters(model: Any) -> bool:
    """Whether the masters are still those that an optimizer's file brought."""
    note: _LoadedMasters | None = vars(model).get(_NOTE)
    optimizer = note.optimizer() if note else None
    return optimizer is not None and note is not None and _steps(optimizer) == note.steps


def _steps(optimizer: Any) -> tuple[int, ...]:
    states = (optimizer.optim.state.get(fake, {}) for fake in optimizer.id_to_fake_params.values())
    return tuple(int(state.get("step", 0)) for state in states)
