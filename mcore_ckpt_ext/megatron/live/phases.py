"""A phase of a resume as data: what the ranks do, who does it, and what a refusal leaves unchanged.

Sequences of phases are performed by the ranks of a job (`live.job_ranks`), or by simulated ones
(`rehearsal.simulated_ranks`), so that a rehearsal has no list of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

from mcore_ckpt_ext.collectives import OPTIMIZER_UNCHANGED


class Who(Enum):
    """Who performs a phase, and with which arguments its function is called after the resume.

    A performer does what differs between ranks: a `LiveRank` for its own rank, in a rehearsal `SimulatedRanks` for all.
    """

    ALL_ALIKE = "every rank, by facts that all ranks know, so that none asks the others: no argument"
    FIRST_RANK = "the first rank, for all: no argument"
    EVERY_RANK = "every rank does the same: no argument"
    EACH_SHARE = "each rank a share of the work: its number, and the number of ranks"
    EACH_RANK = "each rank for its own part of the model: the performer"
    FRAMEWORK = "the framework on all ranks, which communicates by itself: the performer"


@dataclass(frozen=True)
class Phase:
    """One step of a resume. Neighboring phases of one name end with one agreement of all ranks.

    Attributes:
        name: what the ranks are doing, as a refusal states it.
        who: who performs it.
        work: the function; it gets the resume, and the arguments of `who`. Only the framework communicates in it.
        consequence: the state in which a refusal leaves the job.
        collect: takes the resume, the performer, and the results of all ranks; without it, nothing is sent.
        applies: returns False for a resume that does not need the phase.
        writes: True if it changes the optimizer: a rehearsal ends before it.
        quotes: True if its refusals quote the framework, which a rehearsal does not run.
    """

    name: str
    who: Who
    work: Callable[..., Any]
    consequence: str = OPTIMIZER_UNCHANGED
    collect: Callable[[Any, Any, list[Any]], None] | None = None
    applies: Callable[[Any], bool] = lambda resume: True
    writes: bool = False
    quotes: bool = False

    @property
    def is_agreed(self) -> bool:
        """True if the ranks agree at its end that none of them refuses."""
        return self.who not in (Who.ALL_ALIKE, Who.FRAMEWORK)


def agreements(phases: Sequence[Phase]) -> Iterator[list[Phase]]:
    """Yield the phases that end with one agreement each, and single ones that end without."""
    for (_, is_agreed), together in groupby(phases, key=lambda phase: (phase.name, phase.is_agreed)):
        if is_agreed:
            yield list(together)
        else:
            yield from ([phase] for phase in together)
