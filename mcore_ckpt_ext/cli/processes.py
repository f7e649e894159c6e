"""The processes that torchrun started, as a team that shares the work of a command."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed

from mcore_ckpt_ext.cli.output import message
from mcore_ckpt_ext.errors import CheckpointError, UsageError, format_error
from mcore_ckpt_ext.operations.workers import SingleProcess, Team

Item = TypeVar("Item")

# Set by torchrun alone (torch/distributed/elastic/agent/server/local_elastic_agent.py).
_STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
_HOW_TO_START = "start them with torchrun -m mcore_ckpt_ext ..., or leave --join out and use one process"
_DIGITS = 10


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
    _form_group(rank, size)
    try:
        yield _Together()
    finally:
        torch.distributed.destroy_process_group()


def _form_group(rank: int, size: int) -> None:
    place = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if place.startswith(":") or place.endswith(":"):
        raise UsageError(
            "the address at which the processes meet is missing",
            expected="MASTER_ADDR and MASTER_PORT",
            hint=_HOW_TO_START,
        )
    if rank == 0:
        message(f"waiting for the {size} processes that share the work, at {place}")
    try:
        torch.distributed.init_process_group("gloo")
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            "the processes that share the work could not connect", found=str(error).splitlines()[0], where=place,
            hint=_HOW_TO_START,
        ) from error  # fmt: skip


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    if not (text.isascii() and text.isdigit() and len(text) < _DIGITS):
        raise UsageError(
            f"{variable} is not a number", found=repr(text[:_DIGITS]) if text else "nothing", hint=_HOW_TO_START
        )
    return int(text)


class _Together:
    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()

    def all(self, work: Callable[[], None]) -> None:
        """Do the work here, and then tell each other how it went, whatever went wrong: the others wait for it."""
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
            CheckpointError: a process has ended.
        """
        found = [item] * self.size
        try:
            torch.distributed.all_gather_object(found, item)
        except RuntimeError as error:  # of the backend: the connection is closed, or timed out
            raise CheckpointError(
                "another process of this command has ended", found=next(iter(str(error).splitlines()), ""),
                hint="start all of them again; a conversion that has not ended, with --resume",
            ) from error  # fmt: skip
        return found
