"""One save of a job: what it is, its state, and where the ranks meet for it. Nothing here knows a framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from mcore_ckpt_ext.megatron.live.sidecar_writer import PendingSidecar
from mcore_ckpt_ext.megatron.saving.background_writer import Report


class State(Enum):
    """The state of a save: what every rank knows of it, so that it is the same on all of them."""

    PLANNED = "planned"  # what is saved is being put together
    WRITING = "writing"  # the writers have it
    FINALISED = "finalised"  # all ranks have written, and the index names all of it
    PUBLISHING = "publishing"  # rank 0 flushes it, and points the tracker to it
    COMMITTED = "told"  # it is a fact, and every rank knows
    FAILED = "failed"  # what was left of it is gone, and every rank knows


TRANSITIONS = (
    (State.PLANNED, State.WRITING),
    (State.PLANNED, State.FAILED),
    (State.WRITING, State.FINALISED),
    (State.WRITING, State.FAILED),
    (State.FINALISED, State.PUBLISHING),
    (State.PUBLISHING, State.COMMITTED),
    (State.PUBLISHING, State.FAILED),
)
"""From which state a save may go to which."""


class Point(Enum):
    """Where all ranks meet: each says whether it has a problem, and all go on with the same knowledge."""

    BEGIN = 1  # of `save_checkpoint`: the previous save is published, and this one has a place
    INDEX = 2  # of a synchronous save: rank 0 has written the index, and every file is there
    FINALISE = 3  # of an asynchronous one: the same, and each rank has done its steps
    OUTCOME = 4  # how publishing ended


class Ranks(Protocol):
    """The ranks of the job, seen by one of them."""

    @property
    def is_first(self) -> bool:
        """Whether this rank publishes."""

    def agree(self, point: Point, problem: str | None) -> str | None:
        """Meet; returns on every rank the problems of all ranks, with their ranks, or None where no rank has one."""

    def barrier(self) -> None:
        """Stand in for a barrier of Megatron's that this rank's failure has kept it from reaching."""


@dataclass(frozen=True)
class Step:
    """Something that Megatron does on a rank when all writers are done.

    Attributes:
        run: does it.
        has_barrier: it ends with a barrier of all ranks, which the others wait in if it fails here.
        is_own: it is the training script's and does not communicate: its log, its tracker, older ones to delete.
    """

    run: Callable[[], object]
    has_barrier: bool = False
    is_own: bool = False


Finalise = Callable[[Sequence[Step]], None]


@dataclass(eq=False)
class Save:
    """One save, on one rank.

    Attributes:
        iteration: its number, written to `folder`.
        tracker: the file that names the newest checkpoint of the run; what it is to say: `tracker_text`.
        asynchronous: whether training goes on while it is written.
        record: the sidecar, begun; what is done for it beside the plan ends before writers are forked.
        began: when it began, in seconds of the coordinator's clock; for `stalled` of them training stood still.
        has_place: on rank 0, whether its folder is its own: what lay there before no longer passes for whole.
        was_tracked: on rank 0, whether the tracker named its folder before.
        writes_over: on rank 0, whether a checkpoint stood in its folder.
        index_problem: on the ranks that know of one, what went wrong with the index of an asynchronous save.
        bytes: of all its records, on rank 0.
        report: what its writer says about its own failure.
        problem: on rank 0, why it could not be published, until all ranks know.
        line: on rank 0, what the user is told about it.
    """

    iteration: int
    folder: Path
    tracker: Path
    tracker_text: str
    asynchronous: bool
    record: PendingSidecar
    state: State = State.PLANNED
    began: float = 0.0
    stalled: float = 0.0
    has_place: bool = False
    was_tracked: bool = False
    writes_over: bool = False
    index_problem: str | None = None
    bytes: int = 0
    report: Report = field(default_factory=Report)
    problem: str | None = None
    line: str = ""

    @property
    def scratch(self) -> Path:
        """Where Megatron writes its tracker file; ours is written in one step, when it is true."""
        return self.tracker.with_name(f".{self.tracker.name}.scratch")

    def become(self, state: State) -> None:
        """Go on to the next state.

        Raises:
            RuntimeError: no save goes there from its present state: a bug in this package.
        """
        if (self.state, state) not in TRANSITIONS:
            raise RuntimeError(f"a save that is {self.state.value} cannot be {state.value}")
        self.state = state
