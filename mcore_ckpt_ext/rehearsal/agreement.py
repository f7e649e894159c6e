"""The common refusal of all ranks of a simulated job if some of them refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from mcore_ckpt_ext.collectives import OPTIMIZER_UNCHANGED, reason_of, refusal
from mcore_ckpt_ext.errors import (
    CheckpointError,
    LostProcessError,
    ResumeRefusedError,
    StorageError,
    UnreadableCheckpointError,
)
from mcore_ckpt_ext.job.dimensions import with_defaults

Result = TypeVar("Result")
# Errors that say nothing about the checkpoint, and so nothing about what the ranks of a job would do.
_OF_THIS_RUN = (StorageError, LostProcessError)


class RefusedError(Exception):
    """Ends a rehearsal because the job would refuse to resume; the rehearsal reports it.

    Attributes:
        error: the error that the job would raise on every rank.
        is_verbatim: whether the job's message is exactly the same.
    """

    def __init__(self, error: CheckpointError, *, is_verbatim: bool = True) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_verbatim = is_verbatim


@dataclass(frozen=True)
class SimulatedCommunicator:
    """The ranks of a simulated job, as each of them sees them: they all do the same.

    Attributes:
        size: the number of ranks.
        is_verbatim: whether it is known that all of them do what they agree on.
        beyond_rehearsal: errors for actions that a rehearsal cannot do; they are raised unchanged.
    """

    size: int
    is_verbatim: bool = True
    beyond_rehearsal: tuple[type[CheckpointError], ...] = ()
    rank: ClassVar[int] = 0

    def gather(self, item: Result) -> list[Result]:
        """Return the item for each rank."""
        return [item] * self.size

    def agree(
        self, work: Callable[[], Result], phase: str = "", consequence: str = OPTIMIZER_UNCHANGED
    ) -> list[Result]:
        """Do once what all ranks of the job do alike, and return the result for each rank.

        Raises:
            RefusedError: the ranks would refuse.
        """
        try:
            return self.gather(work())
        except self.beyond_rehearsal:
            raise
        except _OF_THIS_RUN:
            raise
        except ResumeRefusedError as error:
            raise RefusedError(error) from error
        except CheckpointError as error:
            error_of_all = refusal(phase, dict.fromkeys(range(self.size), reason_of(error)), consequence)
            raise RefusedError(error_of_all, is_verbatim=self.is_verbatim) from error


def all_read_alike(ranks: int, sizes: Mapping[str, int]) -> bool:
    """Return whether every rank of a job reads all of the optimizer, and so has the same errors.

    A rank recovers the packing of the buffers with its parameters: of all, unless it has a stage, a data-parallel
    share, or some experts.

    Args:
        ranks: the number of ranks.
        sizes: the size of each dimension, by its name in `ParallelLayout`.
    """
    complete = with_defaults({**sizes})
    return ranks == complete["tensor"] == complete["expert_tensor"] and complete["expert"] == 1


def run_by_rank(phase: str, ranks: int, work: Callable[[int], object], *, is_verbatim: bool = True) -> None:
    """Do what each rank of the job does on its own.

    Args:
        phase: the same as in `agree`.
        ranks: number of ranks of the job.
        work: the action of the rank with the given number.
        is_verbatim: whether it is known which rank would have which error.

    Raises:
        RefusedError: some ranks would refuse.
    """

    def error_of(rank: int) -> CheckpointError | None:
        try:
            work(rank)
        except _OF_THIS_RUN:
            raise
        except CheckpointError as error:
            return error
        return None

    errors = {rank: error for rank in range(ranks) if (error := error_of(rank)) is not None}
    if errors:
        # Which record of a file a rank reads first, and so names, depends on the order of its reads.
        of_files = any(isinstance(error, UnreadableCheckpointError) for error in errors.values())
        reasons = {rank: reason_of(error) for rank, error in errors.items()}
        raise RefusedError(refusal(phase, reasons), is_verbatim=is_verbatim and not of_files)
