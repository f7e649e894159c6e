"""The last step of a save, on rank 0 in the background: flush all files, then update the tracker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from mcore_ckpt_ext.collectives import attempt
from mcore_ckpt_ext.layout.sidecar import SaveRecord
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.megatron.saving.save import Save, Step
from mcore_ckpt_ext.patching.singletons import PROCESS

Start = Callable[[Callable[[], str | None]], "Future[str | None]"]
"""Begins a function in the background."""


class Grace:
    """The time that a job has to save before it is killed.

    Attributes:
        seconds: between the signal to end and the kill; None if nothing kills it, or it does not save then.
    """

    seconds: float | None = None

    def hint(self, taken: float) -> str:
        """Return the end of a log line about a save that took these seconds; empty if there is time for it."""
        if self.seconds is None or taken <= self.seconds:
            return ""
        return (
            f"; a save takes longer than the {self.seconds:.0f} s between SIGTERM and SIGKILL: the start after one "
            "resumes from the save before"
        )


@dataclass(frozen=True)
class _Running:
    """The save that is being published in the background."""

    save: Save
    script_steps: Sequence[Step]
    problem: Future[str | None]


class Publisher:
    """Publishes one save at a time, on rank 0; on other ranks it never has one.

    Args:
        disk: the disk that holds the run.
        start: begins a function in the background.
        now: returns the time in seconds.
        log: logs a line.
        warn: logs a line from every rank.
        follow: begins work that depends on a published save, in the background.
    """

    def __init__(
        self,
        disk: Disk,
        start: Start,
        now: Callable[[], float],
        log: Callable[[str], None],
        warn: Callable[[str], None],
        follow: Callable[[Save], None] = lambda save: None,
    ) -> None:
        self._follow = follow
        self._disk = disk
        self._start = start
        self._now = now
        self._log = log
        self._warn = warn
        self._running: _Running | None = None

    def prepare(self, save: Save) -> None:
        """Prepare the folder of a save. Raises OSError if writing fails."""
        save.was_tracked = self._disk.is_tracked(save.folder, save.tracker)
        save.overwrites = self._disk.is_whole(save.folder)
        if save.was_tracked:
            self._disk.remove(save.scratch)  # Megatron would read a killed job's scratch file as the former tracker
        self._disk.prepare(save.folder, save.tracker)
        save.is_prepared = True

    def publish(self, save: Save, tracker: bool = True) -> None:
        """Flush all files, write the sidecar, and let the tracker name the checkpoint.

        Raises:
            OSError: writing failed; the tracker is unchanged.
        """
        self._disk.settle(save.folder)
        taken = self._now() - save.began
        background = max(0.0, taken - save.stalled) if save.asynchronous else 0.0
        took = SaveRecord(save.asynchronous, save.bytes, round(save.stalled, 4), round(background, 4))
        self._disk.publish(save.folder, save.sidecar.text(took), save.tracker if tracker else None, save.tracker_text)
        save.line = (
            f"iteration {save.iteration} is complete on disk: {save.bytes / 1e6:,.1f} MB in {save.folder}, "
            f"training stalled {took.seconds_stalled:.2f} s, {took.seconds_in_background:.2f} s in the background"
            f"{PROCESS.one(Grace).hint(taken)}"
        )

    def begin(self, save: Save, script_steps: Sequence[Step]) -> None:
        """Publish while training continues; the steps of the training script follow in `finish`."""
        self.finish(wait=True)
        if not save.was_tracked:
            # Megatron reads the former tracker to decide which checkpoint to delete; if it named this save, none would
            # be deleted.
            self._disk.copy(save.tracker, save.scratch)
        self._running = _Running(save, script_steps, self._start(partial(attempt, partial(self.publish, save))))

    def finish(self, wait: bool) -> None:
        """Report a save that has been published in the background, and run its steps.

        Args:
            wait: wait until it has been published; otherwise do nothing before.
        """
        running = self._running
        if running is None or not (wait or running.problem.done()):
            return None
        self._running = None
        if (problem := running.problem.result()) is not None:
            gone = "; the iteration that was there before is lost" if running.save.overwrites else ""
            running.save.problem = f"iteration {running.save.iteration} was not saved: {problem}{gone}"
            return self.clear_away([running.save])
        self.run_script_steps(running.save, running.script_steps)
        return self.announce(running.save)

    def run_script_steps(self, save: Save, steps: Sequence[Step]) -> None:
        """Run the steps of the training script; a failure is only logged, since the checkpoint is complete."""
        for step in steps:
            if (failure := attempt(step.run)) is not None:
                self._warn(f"iteration {save.iteration} is saved, but then: {failure}")

    def announce(self, save: Save) -> None:
        """Report that a save is complete, and begin the work that depends on it."""
        self._log(save.line)
        self._disk.remove(save.scratch)
        if (failure := attempt(partial(self._follow, save))) is not None:
            self._warn(f"iteration {save.iteration} is saved, but then: {failure}")

    def clear_away(self, saves: Sequence[Save]) -> None:
        """Remove what failed saves have left; a save without a prepared folder has left nothing."""
        placed = [save for save in saves if save.is_prepared]
        self._disk.discard([save.folder for save in placed if not self._disk.is_tracked(save.folder, save.tracker)])
        for save in saves:
            self._disk.remove(save.scratch)
