"""Tracks whether a patched training loop is inside a load or save.

The loop then handles its optimizer itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mcore_ckpt_ext.patching.singletons import PROCESS


class ReentrancyGuard:
    """True while a Megatron loop with our hooks is inside a load or save."""

    is_busy = False


@contextmanager
def reentrancy_guard() -> Iterator[None]:
    """Within this scope, the patch points of all loops call the original functions."""
    state = PROCESS.one(ReentrancyGuard)
    before = state.is_busy
    state.is_busy = True
    try:
        yield
    finally:
        state.is_busy = before
