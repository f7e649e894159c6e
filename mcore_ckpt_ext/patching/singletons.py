"""The process-wide state of this package; nothing else in hooks and saving is mutable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Kept = TypeVar("Kept")


class Process:
    """One object of each kind, from its first use on."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: dict[type, Any] = {}

    def one(self, kind: type[Kept], make: Callable[[], Kept] | None = None) -> Kept:
        """The object of a kind; the first time, it is made by `make`, or by the kind itself without arguments."""
        with self._lock:
            if kind not in self._kept:
                self._kept[kind] = (make or kind)()
            found: Kept = self._kept[kind]
            return found


PROCESS = Process()
