"""Progress of work that several threads share, in bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]


class ByteCounter:
    """Adds up the work of threads and reports bytes so far, and in all (`total` may be an estimate)."""

    def __init__(self, total: int, progress: Progress, done: int = 0) -> None:
        self._done = done
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add bytes that are done."""
        with self._lock:
            self._done += count
            self._progress(min(self._done, self._total), self._total)

    def finish(self) -> None:
        """Report that everything is done, even if less was counted than estimated."""
        self._progress(self._total, self._total)
