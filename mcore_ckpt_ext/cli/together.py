"""The processes that torchrun started, as a team that shares a conversion."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.offline.team import Alone, Team


@contextmanager
def the_team() -> Iterator[Team]:
    """The processes that share this command: those of torchrun, else this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield Alone()
        return
    torch.distributed.init_process_group("gloo")
    try:
        yield _Together()
    finally:
        torch.distributed.destroy_process_group()


class _Together:
    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()

    def all(self, work: Callable[[], None]) -> None:
        """See `Team`."""
        error: CheckpointError | None = None
        try:
            work()
        except CheckpointError as caught:
            error = caught
        reasons: list[str | None] = [None] * self.size
        torch.distributed.all_gather_object(reasons, None if error is None else str(error))
        failed = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
        if error is not None:
            raise error
        if failed:
            rank, reason = next(iter(failed.items()))
            raise CheckpointError(f"process {rank} failed, so all stop: {reason}")

    def first(self, work: Callable[[], None]) -> None:
        """See `Team`."""
        self.all(work if self.rank == 0 else lambda: None)

    def total(self, count: int) -> int:
        """See `Team`."""
        counts = [0] * self.size
        torch.distributed.all_gather_object(counts, count)
        return sum(counts)
