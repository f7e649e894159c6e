"""Processes that share the work of a command: what one does for all, and how one failure becomes that of all.

`convert`, `verify`, `diff` and rehearsals take a `Team`; `map_shares` deals out items of which each has a result of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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


ONE_PROCESS = SingleProcess()


def share_of(sizes: Sequence[int], rank: int, size: int) -> list[int]:
    """The positions of the items that one of `size` processes takes: the largest first, each to who has least."""
    loads = [(0, number) for number in range(size)]
    own = []
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        load, number = heappop(loads)
        heappush(loads, (load + sizes[position], number))
        if number == rank:
            own.append(position)
    return sorted(own)


def map_shares(
    team: Team,
    work: Callable[[Sequence[Item]], Iterable[Result]],
    items: Sequence[Item],
    size: Callable[[Item], int],
) -> list[Result]:
    """Have each process work on a share of the items.

    Args:
        team: the processes; each calls this with the same items.
        work: gives the result of each item that it is given, in their order.
        items: the same in every process.
        size: what an item costs, about, in the same unit for all.

    Returns:
        The result of every item, in their order, in every process.

    Raises:
        CheckpointError: some process failed, or has ended; on every process.
    """
    own = share_of([size(item) for item in items], team.rank, team.size)
    results: list[Result] = []
    team.all(lambda: results.extend(work([items[position] for position in own])))
    found: dict[int, Result] = {}
    for share in team.gather(dict(zip(own, results, strict=True))):
        found.update(share)
    return [found[position] for position in range(len(items))]
