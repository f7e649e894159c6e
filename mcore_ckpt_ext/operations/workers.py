"""Processes that share the work of a command: steps for all or one of them, and shared failures.

`convert`, `verify`, `diff` and rehearsals take a `Communicator`. `map_shares` distributes items that have a result
each, and `Workers` also to the threads of each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeVar

from mcore_ckpt_ext.communicator import Communicator
from mcore_ckpt_ext.operations.reading import threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def share_of(sizes: Sequence[int], rank: int, size: int) -> list[int]:
    """Return the positions of one process's items; the largest go first, each to the least loaded."""
    loads = [(0, number) for number in range(size)]
    positions = []
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        load, number = heappop(loads)
        heappush(loads, (load + sizes[position], number))
        if number == rank:
            positions.append(position)
    return sorted(positions)


def map_shares(
    team: Communicator,
    work: Callable[[Sequence[Item]], Iterable[Result]],
    items: Sequence[Item],
    size: Callable[[Item], int],
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
    positions = share_of([size(item) for item in items], team.rank, team.size)
    shares = team.agree(lambda: dict(zip(positions, work([items[position] for position in positions]), strict=True)))
    results = {position: result for share in shares for position, result in share.items()}
    return [results[position] for position in range(len(items))]


@dataclass(frozen=True)
class Workers:
    """The threads of the processes that share work: `count` in each process of `team`."""

    team: Communicator
    count: int

    def map(self, work: Callable[[Item], Result], items: Sequence[Item], size: Callable[[Item], int]) -> list[Result]:
        """Return the results of all items, in their order, in every process; see `map_shares`.

        Raises:
            CheckpointError: some process failed, or has ended; on every process.
        """
        with threads(self.count) as pool:
            return map_shares(self.team, lambda share: pool.map(work, share), items, size)
