"""The agreement of all ranks of a simulated job if some of them refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mcore_ckpt_ext.collectives import reason_of, refusal
from mcore_ckpt_ext.errors import CheckpointError, ResumeRefusedError

Result = TypeVar("Result")


class RefusedError(Exception):
    """The job would refuse: ends a rehearsal, which reports it.

    Attributes:
        error: what the job would raise on every rank.
        is_verbatim: in these words.
    """

    def __init__(self, error: CheckpointError, *, is_verbatim: bool = True) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_verbatim = is_verbatim


def on_every_rank(
    phase: str, ranks: int, work: Callable[[], Result], *,
    is_verbatim: bool = True, beyond_rehearsal: tuple[type[CheckpointError], ...] = (),
) -> Result:  # fmt: skip
    """Do once what all ranks of the job do alike.

    Args:
        phase: as of `agreed`.
        ranks: of the job.
        work: what they do.
        is_verbatim: whether it is known that all of them do it.
        beyond_rehearsal: errors that say that a rehearsal cannot do it; they are raised as they are.

    Raises:
        RefusedError: they would refuse.
    """
    try:
        return work()
    except beyond_rehearsal:
        raise
    except ResumeRefusedError as error:
        raise RefusedError(error) from error
    except CheckpointError as error:
        told = refusal(phase, dict.fromkeys(range(ranks), reason_of(error)))
        raise RefusedError(told, is_verbatim=is_verbatim) from error


def by_rank(phase: str, ranks: int, work: Callable[[int], object], *, is_verbatim: bool = True) -> None:
    """Do what the ranks of the job do each for itself.

    Args:
        phase: as of `agreed`.
        ranks: of the job.
        work: what the rank with that number does.
        is_verbatim: whether it is known which rank would find what.

    Raises:
        RefusedError: some would refuse.
    """

    def reason(rank: int) -> str | None:
        try:
            work(rank)
        except CheckpointError as error:
            return reason_of(error)
        return None

    found = {rank: text for rank in range(ranks) if (text := reason(rank)) is not None}
    if found:
        raise RefusedError(refusal(phase, found), is_verbatim=is_verbatim)
