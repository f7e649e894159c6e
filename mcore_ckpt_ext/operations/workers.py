"""Processes that share the work of a command: steps for all or one of them, and shared failures.

`convert`, `verify`, `diff` and rehearsals take a `Team`. `map_shares` distributes items that have a result each, and
`Workers` also to the threads of each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol, TypeVar

from mcore_ckpt_ext.operations.reading import threads

Item = TypeVar("Item")
Result = TypeVar("Result")


class Team(Protocol):
    """The processes that share work; `rank` is this one's number among `size`."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def all(self, work: Callable[[], None]) -> None:
        """Call a function in every process, and return when all have finished it.

        Raises:
            CheckpointError: some process failed; on every process.
        """

    def first(self, work: Callable[[], None]) -> None:
        """Call a function in the first process only; otherwise like `all`."""

    def total(self, count: int) -> int:
        """Return the sum of a number over all processes."""

    def gather(self, item: Item) -> list[Item]:
        """Return an item from every process, in their order.

        Raises:
            CheckpointError: a process has ended.
        """


class SingleProcess:
    """The single-process implementation of `Team`."""

    rank, size = 0, 1

    def all(self, work: Callable[[], None]) -> None:
        """Call a function in this process."""
        work()

    def first(self, work: Callable[[], None]) -> None:
        """Call a function in this process."""
        work()

    def total(self, count: int) -> int:
        """Return the number."""
        return count

    def gather(self, item: Item) -> list[Item]:
        """Return a list of the item."""
        return [item]


ONE_PROCESS = SingleProcess()


def share_of(sizes: Sequence[int], rank: int, size: int) -> list[int]:
    """Return the positions of one process's items; the largest go first, each to the least loaded."""
    loads = [(0, number) for number in range(size)]
    own = []
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        load, number = heappop(loads)
        heappush(loads, (load + sizes[position], number))
        if number == rank:
            own.append(position)
    return sorted(own)


def map_shares(
    team: Team, work: Callable[[Sequence[Item]], Iterable[Result]], items: Sequence[Item], size: Callable[[Item], int]
) -> list[Result]:
    """Let each process work on a share of the items.

    Args:
        team: the processes; each calls this with the same items.
        work: returns the results of its items, in their order.
        items: the same in every process.
        size: returns the approximate cost of an item, in any unit.

    Returns:
        The results of all items, in their order, in every process.

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


@dataclass(frozen=True)
class Workers:
    """The threads of the processes that share work: `count` in each process of `team`."""

    team: Team
    count: int

    def map(self, work: Callable[[Item], Result], items: Sequence[Item], size: Callable[[Item], int]) -> list[Result]:
        """Return the results of all items, in their order, in every process; see `map_shares`.

        Raises:
            CheckpointError: some process failed, or has ended; on every process.
        """
        with threads(self.count) as pool:
            return map_shares(self.team, lambda share: pool.map(work, share), items, size)
