"""The processes that torchrun started, as a team that shares the work of a command."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

from mcore_ckpt_ext.cli.heartbeat import Heartbeat, Store
from mcore_ckpt_ext.cli.output import message
from mcore_ckpt_ext.errors import CheckpointError, UsageError, format_error
from mcore_ckpt_ext.operations.workers import SingleProcess, Team

Item = TypeVar("Item")

# Set by torchrun alone (torch/distributed/elastic/agent/server/local_elastic_agent.py).
_STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
# Whether the agent of torchrun holds the store, and not the first process (torch/distributed/rendezvous.py).
_AGENT_HOLDS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_HOW_TO_START = "start them with torchrun -m mcore_ckpt_ext ..., or leave --join out and use one process"
_DIGITS = 10
_NAMESPACE = "mcore-ckpt"
# While an exchange is waited for: the pause between two looks is a part of the time waited, within these seconds.
_PART_OF_WAIT, _SHORTEST, _LONGEST = 0.05, 0.001, 0.1


@contextmanager
def the_team(*, join: bool = False) -> Iterator[Team]:
    """The processes that share this command: those of torchrun, those that the user says to `join`, or this one alone.

    The variables in a training pod's shell are not enough: the processes that they describe are doing something else.

    Raises:
        UsageError: the variables name no group of processes.
        CheckpointError: the others do not join.
    """
    if not join and _STARTED_BY_TORCHRUN not in os.environ:
        yield SingleProcess()
        return
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if size < 2:
        yield SingleProcess()
        return
    store = _meet(rank, size)
    holder = None if os.environ.get(_AGENT_HOLDS_STORE) == str(True) else 0
    with Heartbeat(store, rank, size, holder) as heartbeat:
        team = _Together(store, rank, size, heartbeat)
        heartbeat.names = team.gather(heartbeat.names[rank])
        team.gather(None)  # from here on, every process can name every other one
        yield team


def _meet(rank: int, size: int) -> Store:
    place = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if place.startswith(":") or place.endswith(":"):
        raise UsageError(
            "the address at which the processes meet is missing",
            expected="MASTER_ADDR and MASTER_PORT",
            hint=_HOW_TO_START,
        )
    # Where a connection ends, torch logs the frames of its functions; this package's error names the process.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if rank == 0:
        message(f"waiting for the {size} processes that share the work, at {place}")
    try:
        store, _, _ = next(rendezvous("env://"))
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            "the processes that share the work could not connect", found=str(error).splitlines()[0], where=place,
            hint=_HOW_TO_START,
        ) from error  # fmt: skip
    # Typed for text, stores take bytes as well: they are a `std::string` (torch/csrc/distributed/c10d/init.cpp).
    return cast("Store", PrefixStore(_NAMESPACE, store))


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    if not (text.isascii() and text.isdigit() and len(text) < _DIGITS):
        raise UsageError(
            f"{variable} is not a number", found=repr(text[:_DIGITS]) if text else "nothing", hint=_HOW_TO_START
        )
    return int(text)


class _Together:
    """The processes exchange what they have by the store at which they have met: no connections between them."""

    def __init__(self, store: Store, rank: int, size: int, heartbeat: Heartbeat) -> None:
        self._store, self._heartbeat = store, heartbeat
        self.rank, self.size = rank, size
        self._exchanges = 0

    def all(self, work: Callable[[], None]) -> None:
        """Do the work here, and then exchange how it went, whatever went wrong: the others wait for it."""
        error: Exception | None = None
        try:
            work()
        except Exception as caught:  # noqa: BLE001 - raised again below
            error = caught
        try:
            reasons = self.gather(None if error is None else format_error(error))
        except CheckpointError:
            if error is not None:
                raise error from None
            raise
        failed = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
        if error is not None:
            raise error
        if failed:
            rank, reason = next(iter(failed.items()))
            raise CheckpointError(f"process {rank} failed, so all stop: {reason}")

    def first(self, work: Callable[[], None]) -> None:
        """Do the work in the first process, and wait for it in the others."""
        self.all(work if self.rank == 0 else lambda: None)

    def total(self, count: int) -> int:
        """The sum over all processes."""
        return sum(self.gather(count))

    def gather(self, item: Item) -> list[Item]:
        """One item from every process, in their order.

        Raises:
            CheckpointError: the process that holds the store has ended.
        """
        self._exchanges += 1
        gathered = self._heartbeat.wait(partial(self._exchange, self._exchanges, pickle.dumps(item)))
        # The processes of this command made these pickles, as with torch's own collectives of objects.
        return [pickle.loads(data) for data in gathered]

    def _exchange(self, number: int, data: bytes) -> list[bytes]:
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], data)
        began = time.monotonic()
        while not self._store.check(keys):
            if self._heartbeat.is_over:
                return []
            time.sleep(min(max(_SHORTEST, (time.monotonic() - began) * _PART_OF_WAIT), _LONGEST))
        if number > 1:  # all have read it, since all have come to this one
            self._store.delete_key(f"{number - 1}/{self.rank}")
        return [self._store.get(key) for key in keys]
