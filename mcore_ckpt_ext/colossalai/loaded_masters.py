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
    vars(optimizer.module)[_NOTE] = _LoadedMasters(weakref.ref(optimizer), steps_of(optimizer))


def has_exact_masters(model: Any) -> bool:
    """Return True if the masters are still those of the optimizer's file."""
    note: _LoadedMasters | None = vars(model).get(_NOTE)
    optimizer = note.optimizer() if note else None
    return optimizer is not None and note is not None and steps_of(optimizer) == note.steps


def steps_of(optimizer: Any) -> tuple[int, ...]:
    """Return the numbers of steps of the tensors that the optimizer steps, in the order of the groups."""
    stepped = (tensor for group in optimizer.optim.param_groups for tensor in group["params"])
    states = (optimizer.optim.state.get(tensor, {}) for tensor in stepped)
    return tuple(int(state.get("step", 0)) for state in states)
