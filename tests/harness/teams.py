"""Processes that share a command, simulated by threads of one process, each with its own `Communicator`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mcore_ckpt_ext.communicator import Communicator

Result = TypeVar("Result")
_SECONDS = 120


class Member:
    """One of several processes, simulated by a thread."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, items: list[Any]) -> None:
        self.rank, self.size, self._meeting, self._items = rank, size, meeting, items

    def agree(self, work: Callable[[], Result], phase: str = "", consequence: str = "") -> list[Result]:
        return self.gather(work())

    def gather(self, item: Any) -> list[Any]:
        self._items[self.rank] = item
        self._meeting.wait(_SECONDS)
        found = list(self._items)
        self._meeting.wait(_SECONDS)
        return found


def in_team(size: int, work: Callable[[Communicator], Result]) -> list[Result]:
    """Run work in a number of simulated processes, and return their results."""
    meeting, items = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(Member(rank, size, meeting, items)), range(size)))
