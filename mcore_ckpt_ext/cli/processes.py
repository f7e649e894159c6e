"""The team of processes, started by torchrun or srun, that share the work of a command."""

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
from mcore_ckpt_ext.cli.ranks import STARTED_BY_TORCHRUN, variables_of_srun
from mcore_ckpt_ext.communicator import Communicator, SingleProcess
from mcore_ckpt_ext.errors import CheckpointError, LostProcessError, UsageError, format_error

Item = TypeVar("Item")
Result = TypeVar("Result")

# Set if the agent of torchrun hosts the store instead of the first process (torch/distributed/rendezvous.py).
_AGENT_HOLDS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_HOW_TO_START = "start them with torchrun -m mcore_ckpt_ext ... or srun, or leave --join out and use one process"
_DIGITS = 10
_NAMESPACE = "mcore-ckpt"
# Polling of an exchange: the pause is a fraction of the time waited so far, between these bounds in seconds.
_PART_OF_WAIT = 0.05
_SHORTEST = 0.001
_LONGEST = 0.1


@contextmanager
def command_team(*, join: bool = False) -> Iterator[Communicator]:
    """Provide the processes that share this command: torchrun's, those to `join`, or only this one.

    RANK and WORLD_SIZE alone are not enough: the shell of a training pod has them, but its processes run the training.

    Raises:
        UsageError: the environment variables do not describe a group of processes.
        CheckpointError: the other processes do not join.
    """
    if not join and STARTED_BY_TORCHRUN not in os.environ:
        yield SingleProcess()
        return
    if STARTED_BY_TORCHRUN not in os.environ:
        os.environ.update(variables_of_srun(os.environ))
    rank = _number("RANK")
    size = _number("WORLD_SIZE")
    if size < 2:
        yield SingleProcess()
        return
    with connect(rank, size) as team:
        yield team


@contextmanager
def connect(rank: int, size: int) -> Iterator[ConnectedProcesses]:
    """Connect several processes, at the address in their environment variables.

    Args:
        rank: the number of this process.
        size: the number of processes.

    Raises:
        UsageError: the address is missing.
        CheckpointError: the processes do not connect, or one of them was lost or has failed.
    """
    store = _meet(rank, size)
    holder = None if os.environ.get(_AGENT_HOLDS_STORE) == str(True) else 0
    with Heartbeat(store, rank, size, holder) as heartbeat:
        team = ConnectedProcesses(store, rank, size, heartbeat)
        heartbeat.names = team.gather(heartbeat.names[rank])
        team.gather(None)  # from now on, every process has the names of all others
        yield team


def _meet(rank: int, size: int) -> Store:
    place = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if place.startswith(":") or place.endswith(":"):
        raise UsageError(
            "the address at which the processes meet is missing",
            expected="MASTER_ADDR and MASTER_PORT",
            hint=_HOW_TO_START,
        )
    # When a connection ends, torch logs a C++ stack trace; this package's own error names the process.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if rank == 0:
        message(f"waiting for the {size} processes that share the work, at {place}")
    try:
        store, _, _ = next(rendezvous("env://", rank=rank, world_size=size))
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            "the processes that share the work could not connect",
            found=str(error).splitlines()[0],
            where=place,
            hint=_HOW_TO_START,
        ) from error
    # Stores are typed for strings but accept bytes: values are `std::string` (torch/csrc/distributed/c10d/init.cpp).
    return cast("Store", PrefixStore(_NAMESPACE, store))


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    if not (text.isascii() and text.isdigit() and len(text) < _DIGITS):
        raise UsageError(
            f"{variable} is not a number", found=repr(text[:_DIGITS]) if text else "nothing", hint=_HOW_TO_START
        )
    return int(text)


class ConnectedProcesses:
    """A team that exchanges objects through the store of its rendezvous, without further connections."""

    def __init__(self, store: Store, rank: int, size: int, heartbeat: Heartbeat) -> None:
        self._store = store
        self._heartbeat = heartbeat
        self.rank = rank
        self.size = size
        self._exchanges = 0

    def agree(self, work: Callable[[], Result], phase: str = "", consequence: str = "") -> list[Result]:
        """Do the work in every process; raise an error in all of them if one has failed, its own in that one."""
        result: Result | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001 - raised again below
            error = caught
        try:
            outcomes = self.gather((result, None if error is None else format_error(error)))
        except CheckpointError:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        for rank, (_, reason) in enumerate(outcomes):
            if reason is not None:
                raise LostProcessError(f"process {rank} failed, so all stop: {reason}")
        return [result for result, _ in outcomes]  # type: ignore[misc]  # none failed

    def gather(self, item: Item) -> list[Item]:
        """Return one item from every process, in the order of ranks.

        Raises:
            CheckpointError: the process that hosts the store has ended.
        """
        self._exchanges += 1
        gathered = self._heartbeat.wait(partial(self._exchange, self._exchanges, pickle.dumps(item)))
        # These pickles come from processes of this command, as in torch's own object collectives.
        return [pickle.loads(data) for data in gathered]

    def announce(self, name: str, text: str) -> None:
        """Store a text for all processes, without waiting for them.

        Raises:
            CheckpointError: the process that hosts the store has ended.
        """
        self._heartbeat.wait(lambda: self._store.set(name, text))

    def announcement(self, name: str) -> str:
        """Return a text that a process has stored; empty if none has.

        Raises:
            CheckpointError: the process that hosts the store has ended.
        """
        return self._heartbeat.wait(lambda: self._store.get(name).decode() if self._store.check([name]) else "")

    def _exchange(self, number: int, data: bytes) -> list[bytes]:
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], data)
        began = time.monotonic()
        while not self._store.check(keys):
            if self._heartbeat.is_over:
                return []
            time.sleep(min(max(_SHORTEST, (time.monotonic() - began) * _PART_OF_WAIT), _LONGEST))
        if number > 1:  # all processes have read the previous exchange, since all take part in this one
            self._store.delete_key(f"{number - 1}/{self.rank}")
        return [self._store.get(key) for key in keys]
