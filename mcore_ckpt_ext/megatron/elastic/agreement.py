"""Agreements of the ranks of a job before it has process groups, by torchrun's store.

The store may be the agents' own and hold what earlier starts have left: `DynamicRendezvousHandler.next_rendezvous`
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, torch 2.13) makes it once for all rounds, and no variable
of a worker names the round. So every rank requests the decision with a number of its own, and takes no answer to
another one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mcore_ckpt_ext.errors import ResumeRefusedError

_PREFIX = "mcore_ckpt_ext/elastic"
_SHORTEST_PAUSE = 0.02
_LONGEST_PAUSE = 0.5
_LONGEST_WAIT = timedelta(seconds=60)


class Agreement:
    """The agreement of one start of a job.

    Attributes:
        start: a number of this start, the same on all ranks; known once `share` has returned.
    """

    def __init__(self, store: Any, rank: int, ranks: int, patience: float) -> None:
        """Begin an agreement.

        Args:
            store: a `torch.distributed.Store` that all ranks share.
            rank: this rank.
            ranks: the number of ranks.
            patience: seconds after which ranks that are missing are given up.
        """
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._patience = patience
        self.start = ""

    def share(self, decide: Callable[[], str]) -> str:
        """Return what the first rank decides, on every rank; the others do not decide.

        Raises:
            ResumeRefusedError: ranks are missing.
        """
        return self._answer(decide()) if self._rank == 0 else self._ask()

    def _answer(self, value: str) -> str:
        self.start = secrets.token_hex(8)
        self._store.set(self._key(self.start, "value"), value)
        others = range(1, self._ranks)
        answered: dict[int, bytes] = {}
        until = time.monotonic() + self._patience
        pause = _SHORTEST_PAUSE
        while others:
            asked = self._wait_for([self._key("asked", str(rank)) for rank in others], until)
            new = {rank: number for rank, number in zip(others, asked, strict=True) if answered.get(rank) != number}
            if new:
                keys = [self._key("to", str(rank), number.decode()) for rank, number in new.items()]
                self._store.multi_set(keys, [self.start] * len(keys))
                answered |= new
            if self._store.add(self._key(self.start, "received"), 0) >= len(others):
                break
            if time.monotonic() > until:
                raise self._waited_in_vain("some ranks have not taken the layout")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return value

    def _ask(self) -> str:
        number = secrets.token_hex(8)
        until = time.monotonic() + self._patience
        self._store.set(self._key("asked", str(self._rank)), number)
        (start,) = self._wait_for([self._key("to", str(self._rank), number)], until)
        self.start = start.decode()
        (value,) = self._wait_for([self._key(self.start, "value")], until)
        self._store.add(self._key(self.start, "received"), 1)
        return value.decode()

    def announce_end(self, code: int, waiting: int, patience: float) -> None:
        """Inform the ranks that wait that the job has ended, until all have seen it."""
        self._store.set(self._key(self.start, "ended"), str(code))
        until = time.monotonic() + patience
        while self._store.add(self._key(self.start, "seen"), 0) < waiting and time.monotonic() < until:
            time.sleep(_SHORTEST_PAUSE)

    def wait_for_end(self) -> int | None:
        """Wait until the ranks that train have ended, and return the exit code; None if the store is gone."""
        key = self._key(self.start, "ended")
        try:
            while not self._is_there(key):
                pass
            code = int(self._store.get(key))
            self._store.add(self._key(self.start, "seen"), 1)
        except (RuntimeError, ValueError):  # the process of the store has ended
            return None
        return code

    def _is_there(self, key: str) -> bool:
        try:
            self._store.wait([key], _LONGEST_WAIT)
        except RuntimeError as error:
            if not _is_timeout(error):
                raise
            return False
        return True

    def _wait_for(self, keys: list[str], until: float) -> list[bytes]:
        left = max(until - time.monotonic(), 1.0)
        try:
            self._store.wait(keys, timedelta(seconds=left))
            answers: list[bytes] = self._store.multi_get(keys)
        except RuntimeError as error:
            if not _is_timeout(error):
                raise
            raise self._waited_in_vain("some ranks do not take part in the choice of a layout") from error
        return answers

    def _waited_in_vain(self, message: str) -> ResumeRefusedError:
        return ResumeRefusedError(
            message,
            found=f"rank {self._rank} of {self._ranks} has waited for {self._patience:.0f} s",
            hint="start all ranks with the same flags and the same environment",
        )

    @staticmethod
    def _key(*parts: str) -> str:
        return "/".join((_PREFIX, *parts))


def _is_timeout(error: RuntimeError) -> bool:
    """Return whether a store did not get a key in time, rather than lost its connection."""
    return "timeout" in str(error).lower() and type(error).__name__ != "DistNetworkError"
