"""Pauses Python's garbage collector while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Python 3.12 itself freezes some 400 objects at its start; a program that freezes has many more, which stay frozen.
_FROZEN_BY_PROGRAM = 1000
# So many new objects are worth counting the frozen ones, which takes 12 ms for each million of them.
_MANY = 20_000


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, which otherwise scans all objects repeatedly and finds nothing to free.

    Unpickling the metadata of 100,000 chunks takes 0.5 s instead of 3.2 s (benchmarks/inspect_metadata.py). Afterwards
    the objects count as old, as after several collections that free none of them, so that only a full collection scans
    them: `gc.unfreeze` puts objects into the oldest generation (documentation of Python 3.10 to 3.14). Several threads
    may pause it at once: the thread that disabled it enables it again. A process that is forked in the meantime runs
    without it.
    """
    was_enabled = gc.isenabled()
    count = gc.get_count()[0]
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            is_worth_it = gc.get_count()[0] - count >= _MANY
            if is_worth_it and gc.get_freeze_count() < _FROZEN_BY_PROGRAM:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
