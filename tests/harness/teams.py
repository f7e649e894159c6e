"""Processes that share a command, simulated by threads of one process, each with its own `Team`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mcore_ckpt_ext.operations.workers import Team

Result = TypeVar("Result")
_SECONDS = 120


class Member:
    """One of several processes, simulated by a thread."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, items: list[Any]) -> None:
        self.rank, self.size, self._meeting, self._items = rank, size, meeting, items

    def all(self, work: Callable[[], None]) -> None:
        work()
        self._meeting.wait(_SECONDS)

    def first(self, work: Callable[[], None]) -> None:
        self.all(work if self.rank == 0 else lambda: None)

    def gather(self, item: Any) -> list[Any]:
        self._items[self.rank] = item
        self._meeting.wait(_SECONDS)
        found = list(self._items)
        self._meeting.wait(_SECONDS)
        return found

    def total(self, count: int) -> int:
        return sum(self.gather(count))


def in_team(size: int, work: Callable[[Team], Result]) -> list[Result]:
    """Run work in a number of simulated processes, and return their results."""
    meeting, items = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(Member(rank, size, meeting, items)), range(size)))
