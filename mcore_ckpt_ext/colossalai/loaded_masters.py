"""Protects masters loaded with the optimizer from a later load of the model's rounded file."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

_NOTE = "_mcore_ckpt_ext_brought"


class _LoadedMasters(NamedTuple):
    optimizer: Any
    steps: tuple[int, ...]


def note_exact_masters(optimizer: Any) -> None:
    """Record that the masters come from the optimizer's file; the record is void after the next step."""
    vars(optimizer.module)[_NOTE] = _LoadedMasters(weakref.ref(optimizer), _steps(optimizer))


def has_exact_masters(model: Any) -> bool:
    """Return True if the masters are still those of the optimizer's file."""
    note: _LoadedMasters | None = vars(model).get(_NOTE)
    optimizer = note.optimizer() if note else None
    return optimizer is not None and note is not None and _steps(optimizer) == note.steps


def _steps(optimizer: Any) -> tuple[int, ...]:
    states = (optimizer.optim.state.get(fake, {}) for fake in optimizer.id_to_fake_params.values())
    return tuple(int(state.get("step", 0)) for state in states)
