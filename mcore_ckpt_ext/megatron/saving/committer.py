"""The last step of a save, on rank 0: everything is flushed, then the tracker names it; training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from mcore_ckpt_ext.collectives import attempt
from mcore_ckpt_ext.layout.sidecar import SaveRecord
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.megatron.saving.save import Save, Step

Start = Callable[[Callable[[], str | None]], "Future[str | None]"]
"""Begins a piece of work beside the training."""


@dataclass(frozen=True)
class _Running:
    """The save that is being published in the background."""

    save: Save
    own: Sequence[Step]
    problem: Future[str | None]


class Publisher:
    """Publishes one save at a time; on other ranks it never has one.

    Args:
        disk: where the run lies.
        start: begins a piece of work beside the training.
        now: the time in seconds.
        say: tells the user a line.
        warn: tells the user a line that is this rank's own.
        follow: begins what follows a save that is a fact, beside the training.
    """

    def __init__(
        self,
        disk: Disk,
        start: Start,
        now: Callable[[], float],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        follow: Callable[[Save], None] = lambda save: None,
    ) -> None:
        self._follow = follow
        self._disk, self._start, self._now, self._say, self._warn = disk, start, now, say, warn
        self._running: _Running | None = None

    def prepare(self, save: Save) -> None:
        """Give a save its place. Raises OSError where the disk refuses."""
        save.was_tracked = self._disk.is_tracked(save.folder, save.tracker)
        save.writes_over = self._disk.is_whole(save.folder)
        if save.was_tracked:
            self._disk.remove(save.scratch)  # Megatron would take what a killed job left there for the one before
        self._disk.prepare(save.folder, save.tracker)
        save.has_place = True

    def publish(self, save: Save, tracker: bool = True) -> None:
        """Once all files are written: flush, record, point the tracker to it.

        Raises:
            OSError: the disk refuses; the tracker names what it named.
        """
        self._disk.settle(save.folder)
        taken = self._now() - save.began
        background = max(0.0, taken - save.stalled) if save.asynchronous else 0.0
        took = SaveRecord(save.asynchronous, save.bytes, round(save.stalled, 4), round(background, 4))
        self._disk.publish(save.folder, save.record.text(took), save.tracker if tracker else None, save.tracker_text)
        save.line = (
            f"iteration {save.iteration} is complete on disk: {save.bytes / 1e6:,.1f} MB in {save.folder}, "
            f"training stalled {save.stalled:.2f} s, {background:.2f} s in the background"
        )

    def begin(self, save: Save, own: Sequence[Step]) -> None:
        """Publish while training goes on; the training script's own steps follow at the end."""
        self.end(wait=True)
        if not save.was_tracked:
            # Megatron reads it before writing it, to see what it may delete: nothing where it named this one.
            self._disk.copy(save.tracker, save.scratch)
        self._running = _Running(save, own, self._start(partial(attempt, partial(self.publish, save))))

    def end(self, wait: bool) -> None:
        """If a publication has ended: say so, and do what was waiting for it."""
        running = self._running
        if running is None or not (wait or running.problem.done()):
            return None
        self._running = None
        if (problem := running.problem.result()) is not None:
            gone = "; the iteration that was there before is lost" if running.save.writes_over else ""
            running.save.problem = f"iteration {running.save.iteration} was not saved: {problem}{gone}"
            return self.clear_away([running.save])
        self.do(running.save, running.own)
        return self.tell(running.save)

    def do(self, save: Save, own: Sequence[Step]) -> None:
        """Run the training script's own steps after a save."""
        for step in own:
            if (failure := attempt(step.run)) is not None:
                self._warn(f"iteration {save.iteration} is saved, but then: {failure}")

    def tell(self, save: Save) -> None:
        """Tell the user that a save is a fact, and begin what follows it."""
        self._say(save.line)
        self._disk.remove(save.scratch)
        if (failure := attempt(partial(self._follow, save))) is not None:
            self._warn(f"iteration {save.iteration} is saved, but then: {failure}")

    def clear_away(self, saves: Sequence[Save]) -> None:
        """Remove what failed saves have left, never what another one has: a save that got no place has left nothing."""
        placed = [save for save in saves if save.has_place]
        self._disk.discard([save.folder for save in placed if not self._disk.is_tracked(save.folder, save.tracker)])
        for save in saves:
            self._disk.remove(save.scratch)
