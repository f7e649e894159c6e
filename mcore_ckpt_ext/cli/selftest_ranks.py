"""Runs the self-test in processes that torchrun or srun has started, one for each rank.

The processes may run on several nodes. Each starts the program of its rank for every order, and ends it if another rank
has failed. The first process chooses the orders and reports the results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TypeAlias

from mcore_ckpt_ext.cli.processes import ConnectedProcesses
from mcore_ckpt_ext.cli.ranks import Place
from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.selftest.jobs import Order, read_results
from mcore_ckpt_ext.selftest.launcher import PROGRAM, Ended, Ranks, free_port, start

Wanted: TypeAlias = "tuple[str, int] | int"
"""What the first process wants of all: to run the order of a file, meeting at a port; or to end with an exit code."""


def require_shared_folder(place: Place, folder: Path | None) -> None:
    """Refuse several nodes without a folder that all of them share.

    Raises:
        UsageError: no folder was passed.
    """
    if folder is None and place.on_node < place.total:
        raise UsageError(
            "the nodes of this job do not share a folder for temporary files",
            hint="pass --folder FOLDER, on a file system that all nodes share",
        )


class SelftestRanks:
    """The processes of all ranks; in each round, each runs the program of its rank with the same order."""

    def __init__(
        self, place: Place, processes: ConnectedProcesses, patience: float, program: Sequence[str] = PROGRAM
    ) -> None:
        """Create the view of one process.

        Args:
            place: place of this process.
            processes: all processes, connected.
            patience: seconds without progress after which the ranks are ended.
            program: command line of a rank, before the order.
        """
        self._place = place
        self._processes = processes
        self._patience = patience
        self._program = program
        self._round = 0

    def lead(self, test: Callable[[Callable[[Order], Ended]], int]) -> int:
        """Run a test in the first process, while the others `follow`.

        Args:
            test: the test. It receives a function that runs an order on all ranks, and returns an exit code.
        """
        code = test(self._run_order)
        self._exchange(code)
        return code

    def follow(self) -> int:
        """Run the orders of the first process, and return its exit code."""
        while True:
            order = self._exchange(0)
            if isinstance(order, int):
                return order
            path, port = order
            self._run_rank(Path(path), port, lambda: 0, inf)

    def _run_order(self, order: Order) -> Ended:
        path = order.write().resolve()
        port = free_port()
        self._exchange((str(path), port))
        return self._run_rank(path, port, lambda: len(read_results(order.results)), self._patience)

    def _exchange(self, order: Wanted) -> Wanted:
        """Return what the first process wants; what the others pass does not count."""
        return self._processes.gather(order)[0]

    def _run_rank(self, order: Path, port: int, progress: Callable[[], object], patience: float) -> Ended:
        place = self._place
        failed = f"failed in round {self._round}"
        ranks = Ranks(place.rank, 1, place.total, place.local, place.on_node, os.environ["MASTER_ADDR"], port)
        ended = start(
            ranks,
            order,
            progress=progress,
            patience=patience,
            program=self._program,
            interruption=lambda: self._processes.announcement(failed),
        )
        if not ended.succeeded:
            self._processes.announce(failed, str(ended))
        self._processes.gather(None)  # all ranks of this round have ended
        self._round += 1
        return ended
