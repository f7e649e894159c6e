"""The process-wide state of this package; patching and saving have no other mutable globals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Kept = TypeVar("Kept")


class Process:
    """A registry with one object of each kind, which is made on first use."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: dict[type, Any] = {}

    def one(self, kind: type[Kept], make: Callable[[], Kept] | None = None) -> Kept:
        """Return the object of a kind; the first call makes it, by `make` or by the kind without arguments."""
        with self._lock:
            if kind not in self._kept:
                self._kept[kind] = (make or kind)()
            instance: Kept = self._kept[kind]
            return instance


PROCESS = Process()
