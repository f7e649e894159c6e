"""Runs the self-test in processes that torchrun or srun has started, one for each rank.

The processes may run on several nodes. Each starts the program of its rank for every order, and ends it if another rank
has failed. The first process sends the orders and reports the results, through a store of torch.distributed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from mcore_ckpt_ext.cli.ranks import Place
from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.selftest.jobs import Order, read_results
from mcore_ckpt_ext.selftest.launcher import PROGRAM, Ended, Ranks, free_port, start

_NAMESPACE = "mcore-ckpt-selftest"
_FOR_EVER = float("inf")


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


class Team:
    """The processes of all ranks; in each round, each runs the program of its rank with the same order."""

    def __init__(self, place: Place, patience: float, program: Sequence[str] = PROGRAM) -> None:
        """Connect to the other processes.

        Args:
            place: place of this process.
            patience: seconds without progress after which the ranks are ended.
            program: command line of a rank, before the order.
        """
        self._place, self._patience, self._program = place, patience, program
        store, _, _ = next(rendezvous("env://"))
        self._store = PrefixStore(_NAMESPACE, store)
        self._round = 0

    def lead(self, test: Callable[[Callable[[Order], Ended]], int]) -> int:
        """Run a test in the first process, while the others `follow`.

        Args:
            test: the test. It receives a function that runs an order on all ranks, and returns an exit code.
        """
        code = 2  # if the test raises an error
        try:
            code = test(self._run_order)
        finally:
            self._send({"code": code})
        return code

    def follow(self) -> int:
        """Run the orders of the first process, and return its exit code."""
        while True:
            wanted = json.loads(self._store.get(self._key("wanted")).decode())
            if "code" in wanted:
                return int(wanted["code"])
            self._run_rank(Path(wanted["order"]), wanted["port"], lambda: 0, _FOR_EVER)

    def _run_order(self, order: Order) -> Ended:
        path, port = order.write().resolve(), free_port()
        self._send({"order": str(path), "port": port})
        return self._run_rank(path, port, lambda: len(read_results(order.results)), self._patience)

    def _send(self, wanted: Mapping[str, Any]) -> None:
        self._store.set(self._key("wanted"), json.dumps(wanted))

    def _run_rank(self, order: Path, port: int, progress: Callable[[], object], patience: float) -> Ended:
        place, failed = self._place, self._key("failed")
        ranks = Ranks(place.rank, 1, place.total, place.local, place.on_node, os.environ["MASTER_ADDR"], port)
        ended = start(
            ranks, order, progress=progress, patience=patience, program=self._program,
            interruption=lambda: self._store.get(failed).decode() if self._store.check([failed]) else "",
        )  # fmt: skip
        if not ended.succeeded:
            self._store.set(failed, str(ended))
        self._wait_for_all()
        self._round += 1
        return ended

    def _wait_for_all(self) -> None:
        """Wait until all ranks of this round have ended, before the next round begins."""
        if self._store.add(self._key("ended"), 1) == self._place.total:
            self._store.set(self._key("all ended"), "")
        self._store.wait([self._key("all ended")])

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"
