"""One protocol for the ranks of a job and the processes of a command, as one of them sees them.

`collectives.TorchRanks` implements it for torch.distributed, `cli.processes.ConnectedProcesses` by a store,
`rehearsal.agreement.SimulatedCommunicator` for simulated ranks, and `SingleProcess` for a program on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Communicator(Protocol):
    """Ranks or processes that fail together; `rank` is this one's number among `size`."""

    @property
    def rank(self) -> int:
        """The number of this one."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, item: Item) -> list[Item]:
        """Return an item of each, in their order.

        Raises:
            CheckpointError: one of them has ended.
        """

    def agree(self, work: Callable[[], Result], phase: str = "", consequence: str = "") -> list[Result]:
        """Do `work`, which must not communicate, everywhere, and return all results in their order.

        Args:
            work: the function to call.
            phase: names the work in the message of a refusal.
            consequence: the state in which a refusal leaves the job.

        Raises:
            CheckpointError: the work failed somewhere; on all of them.
        """


class SingleProcess:
    """A program on its own."""

    rank = 0
    size = 1

    def gather(self, item: Item) -> list[Item]:
        """Return a list of the item."""
        return [item]

    def agree(self, work: Callable[[], Result], phase: str = "", consequence: str = "") -> list[Result]:
        """Return a list of the result."""
        return [work()]


ONE_PROCESS = SingleProcess()


def run_on_all(communicator: Communicator, work: Callable[[], Result]) -> Result:
    """Do some work everywhere, and return this one's result when it is done everywhere.

    Raises:
        CheckpointError: the work failed somewhere; on all of them.
    """
    results: list[Result] = []
    communicator.agree(lambda: results.append(work()))
    return results[0]


def run_on_first(communicator: Communicator, work: Callable[[], Result]) -> Result | None:
    """Do some work on the first only, otherwise like `run_on_all`; the others return None."""
    return run_on_all(communicator, lambda: work() if communicator.rank == 0 else None)


def total(communicator: Communicator, count: int) -> int:
    """Return the sum of a number of all of them."""
    return sum(communicator.gather(count))
