"""Coordinates the saves of a job: maps Megatron's calls to state changes that all ranks share.

Tests can replace its collaborators: the ranks, the disk, the writers and the clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mcore_ckpt_ext.collectives import Failure, attempt, text_of
from mcore_ckpt_ext.errors import CheckpointError, SaveFailedError
from mcore_ckpt_ext.megatron.saving.publisher import Publisher
from mcore_ckpt_ext.megatron.saving.save import Finalize, Point, Ranks, Save, State, Step
from mcore_ckpt_ext.settings import CONTINUE, ON_SAVE_FAILURE

_POLL_SECONDS = 0.1
Stock = Callable[[], Any]


class WriterLostError(SaveFailedError):
    """The writer of some rank has died or is stuck; raised on every rank."""


class _NotFinalizedError(SaveFailedError):
    """The writers are done, but the save is incomplete; raised on every rank."""

    def __init__(self, message: str, save: Save) -> None:
        super().__init__(message)
        self.save = save


class Writers(Protocol):
    """The background writers of this rank, for one of Megatron's strategies."""

    def take_over(self, request: Any, save: Save, finalize: Finalize) -> Any:
        """Return the request, extended by error reports; `finalize` gets its finalization functions, if any."""

    def guard_scheduling(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which scheduling a request does not wait for a dead writer."""

    def watch_newest(self, completed: Callable[[str], str]) -> None:
        """Let `are_done` raise WriterLostError on all ranks, from now on, if a writer fails.

        Args:
            completed: adds the writer's own error report to a problem.
        """

    def are_done(self) -> bool:
        """Return True if no write is outstanding; the result is the same on every rank."""

    def ending_writers(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ending the writers does not wait for a dead one."""

    def renew(self) -> None:
        """Give up all writers and their outstanding results, and start new ones."""

    def drop_results(self) -> None:
        """Drop the results that writers have delivered for a save that was given up."""


class Coordinator:
    """Owns the saves of a job, on one of its ranks.

    Args:
        ranks: the ranks of the job.
        publisher: performs the last step of a save, on rank 0.
        log: logs a line, on rank 0.
        goes_on: returns True if training continues when a save fails; the same on every rank.
        clock: a function that returns the time in seconds, and one that sleeps.
    """

    def __init__(
        self,
        ranks: Ranks,
        publisher: Publisher,
        log: Callable[[str], None],
        goes_on: Callable[[], bool],
        clock: tuple[Callable[[], float], Callable[[float], None]] = (time.monotonic, time.sleep),
    ) -> None:
        self._ranks = ranks
        self._publisher = publisher
        self._log = log
        self._goes_on = goes_on
        self._now, self._sleep = clock
        self._saves: list[Save] = []  # the saves that are being written or published, oldest first
        self._active: Save | None = None  # the save that nested calls plan or finalize

    def run(self, save: Save, stock: Callable[[bool], Any], must_track: bool = False) -> Any:
        """Run one `save_checkpoint`: the checkpoint is complete afterwards, or absent.

        Args:
            save: the iteration, the folder and the tracker.
            stock: Megatron's own function; its argument is True if the tracker file goes to the scratch place.
            must_track: Megatron must write the tracker of a synchronous save itself.

        Raises:
            SaveFailedError: on every rank, unless the user lets training continue.
        """
        save.began = self._now()
        if reason := self._do_on_first_rank(Point.BEGIN, partial(self._begin, save)):
            self._conclude(exchange=True)
            return self._fail(f"iteration {save.iteration} cannot be saved to {save.folder}:\n  {reason}", [save])
        self._conclude(exchange=False)
        redirected = self._ranks.is_first and (save.asynchronous or not must_track or save.was_tracked)
        try:
            listening = contextlib.nullcontext() if save.asynchronous else save.report.record_errors()
            with self._activate(save), listening:
                if not save.asynchronous:
                    save.become(State.WRITING)
                result = stock(redirected)
        except Failure as error:
            return self._fail(f"iteration {save.iteration} was not saved: {text_of(error)}", [save])
        except SaveFailedError as error:
            return self._fail(str(error), [save])
        save.stalled = self._now() - save.began
        if not save.asynchronous:
            self._publish_now(save, redirected)
        return result

    def schedule(self, request: Any, writers: Writers, stock: Callable[[Any], Any]) -> Any:
        """Run one `schedule_async_save`: pass the plan of the active save to the writers."""
        save = self._active
        if save is None:
            return stock(request)
        save.sidecar.share()
        request = writers.take_over(request, save, partial(self._finalize, save))
        with writers.guard_scheduling():
            result = stock(request)
        if request.finalize_fns:
            save.become(State.WRITING)
            self._saves.append(save)
        writers.watch_newest(self._with_report)
        return result

    def is_writing(self, folder: Path) -> bool:
        """Return whether writers are at work in a folder; the same on all ranks."""
        return any(save.folder == folder for save in self._at(State.WRITING))

    def poll(self, writers: Writers, stock: Stock) -> Any:
        """Run one `maybe_finalize_async_save` of a training step."""
        self._publisher.finish(wait=False)
        return self._poll(writers, stock) if self._at(State.WRITING) else stock()

    def drain(self, writers: Writers, poll: Stock, stock: Stock, ending: bool) -> Any:
        """Run one `maybe_finalize_async_save` that waits, but never for a dead writer.

        `ending`: end the writers, too.

        Raises:
            SaveFailedError: on every rank, unless the user lets training continue.
        """
        self._publisher.finish(wait=False)
        while self._at(State.WRITING) and not writers.are_done():
            self._poll(writers, poll)
            for save in self._at(State.WRITING):
                save.stalled += _POLL_SECONDS
            self._sleep(_POLL_SECONDS if self._at(State.WRITING) else 0)
        if reasons := self._conclude(exchange=True):
            self._fail("; ".join(reasons))
        with writers.ending_writers() if ending else contextlib.nullcontext():
            return stock()

    def write_index(self, write: Callable[[Save | None, list[str]], Any]) -> Any:
        """Run the step that writes the index; errors on rank 0 reach all ranks.

        Args:
            write: runs it for the active save, and appends problems to the list.

        Raises:
            SaveFailedError: on every rank, in a synchronous save. In an asynchronous save no rank raises here, because
                up to 0.12 all ranks meet right afterwards (`finalize_fn`, strategies/torch.py): `_finalize` reports
                problems.
        """
        save = self._active
        problems: list[str] = []
        results: list[Any] = []
        # Up to 0.12, it raises on rank 0 only if another rank's writer reported an error.
        problem = attempt(lambda: results.append(write(save, problems)))
        problem = "; ".join(problems[:3]) or problem
        if save is not None and save.asynchronous:
            save.index_problem = problem
            return results[0] if results else None
        if save is not None and problem is not None:
            problem = save.report.with_output(problem)
        if (reason := self._ranks.agree_on(Point.INDEX, problem)) is not None:
            failure = "the index could not be written" if save is None else f"iteration {save.iteration} was not saved"
            raise SaveFailedError(f"{failure}:\n  {reason}")
        return results[0] if results else None

    def _at(self, state: State) -> list[Save]:
        return [save for save in self._saves if save.state is state]

    @contextlib.contextmanager
    def _activate(self, save: Save) -> Iterator[None]:
        self._active, before = save, self._active
        try:
            yield
        finally:
            self._active = before

    def _do_on_first_rank(self, point: Point, work: Callable[[], object]) -> str | None:
        return self._ranks.agree_on(point, attempt(work) if self._ranks.is_first else None)

    def _begin(self, save: Save) -> None:
        """On rank 0: wait until the previous save is published, and prepare the folder of this one."""
        self._publisher.finish(wait=True)
        if failures := [before.problem for before in self._saves if before.problem is not None]:
            raise CheckpointError("; ".join(failures))
        self._publisher.prepare(save)

    def _publish_now(self, save: Save, redirected: bool) -> None:
        save.become(State.FINALIZED)
        save.become(State.PUBLISHING)
        if reason := self._do_on_first_rank(Point.OUTCOME, partial(self._publisher.publish, save, redirected)):
            return self._fail(f"iteration {save.iteration} was not saved:\n  {reason}", [save])
        save.become(State.COMMITTED)
        return self._publisher.announce(save) if self._ranks.is_first else None

    def _poll(self, writers: Writers, stock: Stock) -> Any:
        try:
            return stock()
        except WriterLostError as error:
            lost = self._at(State.WRITING)
            names = ", ".join(str(save.iteration) for save in lost)
            writers.renew()
            writers.drop_results()
            return self._fail(f"iteration {names} was not saved:\n  {error}", lost)
        except _NotFinalizedError as error:
            if self._at(State.WRITING) == [error.save]:  # other saves use the same queue
                writers.drop_results()
            return self._fail(str(error), [error.save])

    def _finalize(self, save: Save, steps: Sequence[Step]) -> None:
        """Do what Megatron does when all writers are done, but exchange errors before the tracker changes.

        Raises:
            SaveFailedError: on every rank.
        """
        began = self._now()
        problem = None
        with self._activate(save):
            for step in (step for step in steps if not step.is_of_script):
                if problem is None:
                    problem = attempt(step.run)
                    problem = save.index_problem if problem is None else problem
                if problem is not None and step.has_barrier:
                    self._ranks.barrier()
        # The reason may be empty: an error that Megatron collects from all ranks has a text on rank 0 only.
        reason = self._ranks.agree_on(Point.FINALIZE, None if problem is None else save.report.with_output(problem))
        save.stalled += self._now() - began
        if reason is not None:
            raise _NotFinalizedError(f"iteration {save.iteration} was not saved:\n  {reason}", save)
        save.become(State.FINALIZED)
        script_steps = [step for step in steps if step.is_of_script]
        if self._ranks.is_first:
            self._publisher.begin(save, script_steps)
        else:
            self._publisher.run_script_steps(save, script_steps)
        save.become(State.PUBLISHING)

    def _conclude(self, exchange: bool) -> list[str]:
        """Let every rank learn which saves were published; without `exchange`, assume that all were.

        Returns:
            Why saves could not be published.
        """
        reasons = []
        for save in self._at(State.PUBLISHING):
            if exchange and self._ranks.is_first:
                self._publisher.finish(wait=True)
            reason = self._ranks.agree_on(Point.OUTCOME, save.problem) if exchange else None
            save.become(State.FAILED if reason else State.COMMITTED)
            self._saves.remove(save)
            reasons += [reason.removeprefix("rank 0: ")] if reason else []
        return reasons

    def _with_report(self, problem: str) -> str:
        writing = self._at(State.WRITING)
        return writing[0].report.with_output(problem) if writing else problem

    def _fail_reported(self) -> list[tuple[Save, str]]:
        """Give up the saves of which a writer has reported a failure; others may still be completed.

        Returns:
            These saves, the newest first, with the reports of all ranks.
        """
        failed = []
        for save in reversed(self._at(State.WRITING)):
            if reason := self._ranks.agree_on(Point.REPORT, save.report.failure()):
                save.become(State.FAILED)
                self._saves.remove(save)
                failed.append((save, reason))
        return failed

    def _fail(self, message: str, saves: Sequence[Save] = ()) -> None:
        """Remove what failed saves have left, and continue or stop by the user's choice, on all ranks.

        Raises:
            SaveFailedError: the user does not let training continue.
        """
        # A call within `save_checkpoint` may have failed this save already, or committed it and failed the one before.
        saves = [save for save in saves if save.state not in (State.FAILED, State.COMMITTED)]
        for save in saves:
            save.become(State.FAILED)
        self._saves = [save for save in self._saves if save not in saves]
        goes_on = self._goes_on()
        if not goes_on:  # otherwise, the next poll reports them
            for earlier, reason in self._fail_reported():
                message = f"iteration {earlier.iteration} was not saved:\n  {reason}\n{message}"
                saves.append(earlier)
        if self._ranks.is_first:
            self._publisher.clear_away(saves)
        if goes_on:
            return self._log(f"{message}; training goes on, the next checkpoint will be tried as planned")
        gone = [str(save.iteration) for save in saves if save.overwrites and save.is_prepared]
        untouched = "other checkpoints are unchanged"
        if gone:  # set on rank 0 only
            untouched = f"what stood there of iteration {', '.join(gone)} is gone, {untouched}"
        choice = f"{ON_SAVE_FAILURE.flag} {CONTINUE} (or {ON_SAVE_FAILURE.name}={CONTINUE})"
        hint = f"{choice} lets training go on; {untouched}"
        raise SaveFailedError(message, hint=hint) from None
