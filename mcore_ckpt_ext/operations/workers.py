"""Processes that share the work of a command: what one does for all, and how one failure becomes that of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class Team(Protocol):
    """The processes; `rank` is this one's number among `size`."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all(self, work: Callable[[], None]) -> None:
        """Do something in every process, and go on when all have done it.

        Raises:
            CheckpointError: some process failed; on every process.
        """

    def first(self, work: Callable[[], None]) -> None:
        """Do something in the first process only; otherwise like `all`."""

    def total(self, count: int) -> int:
        """The sum of a number over all processes."""

    def gather(self, item: Item) -> list[Item]:
        """One item from every process, in their order.

        Raises:
            CheckpointError: a process has ended.
        """


class SingleProcess:
    """One process."""

    rank, size = 0, 1

    def all(self, work: Callable[[], None]) -> None:
        """Do something in every process, and go on when all have done it."""
        work()

    def first(self, work: Callable[[], None]) -> None:
        """Do something in the first process only; otherwise like `all`."""
        work()

    def total(self, count: int) -> int:
        """The sum of a number over all processes."""
        return count

    def gather(self, item: Item) -> list[Item]:
        """One item from every process, in their order."""
        return [item]
