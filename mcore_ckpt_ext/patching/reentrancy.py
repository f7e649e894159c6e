"""Whether a loop that this package knows is at work, which decides for itself how its optimizer is loaded and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mcore_ckpt_ext.patching.singletons import PROCESS


class ReentrancyGuard:
    """True while a Megatron loop with our hooks is inside a load or save."""

    is_busy = False


@contextmanager
def reentrancy_guard() -> Iterator[None]:
    """Within this scope, the patch points of any loop leave everything to whoever has called."""
    state = PROCESS.one(ReentrancyGuard)
    before, state.is_busy = state.is_busy, True
    try:
        yield
    finally:
        state.is_busy = before
