"""One save of a job: its data, its state, and the points at which ranks meet; without a framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from mcore_ckpt_ext.megatron.live.sidecar_writer import PendingSidecar
from mcore_ckpt_ext.megatron.saving.background_writer import Report


class State(Enum):
    """The state of a save, which is the same on all ranks."""

    PLANNED = "planned"  # its content is being collected
    WRITING = "writing"  # the writers are writing it
    FINALIZED = "finalized"  # all ranks have written, and the index lists everything
    PUBLISHING = "publishing"  # rank 0 flushes it, and lets the tracker name it
    COMMITTED = "committed"  # it is complete on disk, and every rank has been notified
    FAILED = "failed"  # its remains are removed, and every rank has been notified


TRANSITIONS = (
    (State.PLANNED, State.WRITING),
    (State.PLANNED, State.FAILED),
    (State.WRITING, State.FINALIZED),
    (State.WRITING, State.FAILED),
    (State.FINALIZED, State.PUBLISHING),
    (State.PUBLISHING, State.COMMITTED),
    (State.PUBLISHING, State.FAILED),
)
"""The permitted transitions between states."""


class Point(Enum):
    """A point at which all ranks meet and exchange their problems."""

    BEGIN = 1  # of `save_checkpoint`: the previous save is published, and this one has a folder
    INDEX = 2  # of a synchronous save: rank 0 has written the index, and every file is there
    FINALIZE = 3  # of an asynchronous save: the same, and each rank has run its finalization functions
    OUTCOME = 4  # of publishing: does the tracker name it?
    REPORT = 5  # of a failure that stops the job, for each earlier save: has one of its writers failed, too?


class Ranks(Protocol):
    """The ranks of the job, as seen by one of them."""

    @property
    def is_first(self) -> bool:
        """True on the rank that publishes saves."""

    def agree_on(self, point: Point, problem: str | None) -> str | None:
        """Meet all ranks; return the problems of all ranks with their ranks, or None if no rank has one."""

    def barrier(self) -> None:
        """Take part in a barrier of Megatron that this rank does not reach because it has failed."""


@dataclass(frozen=True)
class Step:
    """A finalization function that Megatron runs on a rank when all writers are done.

    Attributes:
        run: the function.
        has_barrier: it ends with a barrier, in which the other ranks wait even if it fails on this one.
        is_of_script: it belongs to Megatron's training script and does not communicate: logging, tracker, deleting
            older checkpoints.
    """

    run: Callable[[], object]
    has_barrier: bool = False
    is_of_script: bool = False


Finalize = Callable[[Sequence[Step]], None]


@dataclass(eq=False)
class Save:
    """One save, on one rank.

    Attributes:
        iteration: its number.
        folder: the iteration folder.
        tracker: the file that names the newest checkpoint of the run.
        tracker_text: the content that the tracker gets.
        asynchronous: training continues while it is written.
        sidecar: its pending sidecar; the background work for it ends before writers are forked.
        state: see `State`.
        began: the time when it began, in seconds of the coordinator's clock.
        stalled: how long it stopped training, in seconds.
        is_prepared: on rank 0, its folder is ready: an earlier checkpoint there no longer counts as complete.
        was_tracked: on rank 0, the tracker named its folder before.
        overwrites: on rank 0, its folder held a checkpoint.
        index_problem: the problem with the index of an asynchronous save, on the ranks that found one.
        bytes: the size of all its records, on rank 0.
        report: its writer's report of its own failure.
        problem: on rank 0, why it could not be published, until all ranks have been notified.
        line: on rank 0, the log line about it.
    """

    iteration: int
    folder: Path
    tracker: Path
    tracker_text: str
    asynchronous: bool
    sidecar: PendingSidecar
    state: State = State.PLANNED
    began: float = 0.0
    stalled: float = 0.0
    is_prepared: bool = False
    was_tracked: bool = False
    overwrites: bool = False
    index_problem: str | None = None
    bytes: int = 0
    report: Report = field(default_factory=Report)
    problem: str | None = None
    line: str = ""

    @property
    def scratch(self) -> Path:
        """Where Megatron writes its tracker; the real one is replaced atomically once everything is on disk."""
        return self.tracker.with_name(f".{self.tracker.name}.scratch")

    def become(self, state: State) -> None:
        """Change the state.

        Raises:
            RuntimeError: the transition is not permitted: a bug in this package.
        """
        if (self.state, state) not in TRANSITIONS:
            raise RuntimeError(f"a save that is {self.state.value} cannot be {state.value}")
        self.state = state
