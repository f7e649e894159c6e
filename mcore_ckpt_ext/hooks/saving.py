"""The seams of saving: a checkpoint is announced once it is a fact, and a writer that dies is noticed by every rank.

What runs around `save_checkpoint`, `schedule_async_save`, `maybe_finalize_async_save` (megatron/training) and
`save_state_dict_async_finalize` (megatron/core/dist_checkpointing/strategies/state_dict_saver.py, and for the strategy
`nvrx` nvidia_resiliency_ext/checkpointing/async_ckpt/state_dict_saver.py); read in core_v0.7.0, 0.12.3, 0.16.1, 0.19.0
and 0.19.2, and in nvidia-resiliency-ext 0.6.0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from mcore_ckpt_ext.errors import CheckpointError, SaveFailedError
from mcore_ckpt_ext.hooks.announce import announce, is_first_rank
from mcore_ckpt_ext.hooks.writers import (
    WriterLostError,
    drop_results,
    renew_writers,
    watch_last,
    watched_end,
    watched_start,
)  # fmt: skip
from mcore_ckpt_ext.layout.sidecar import SaveRecord
from mcore_ckpt_ext.online.agreement import told_to_all
from mcore_ckpt_ext.online.durable import (
    SCRATCH_TRACKER,
    discard,
    prepare,
    problems_on_disk,
    publish,
    settle,
    stored_bytes,
    tracked,
)  # fmt: skip
from mcore_ckpt_ext.online.writer import Report

Function = Callable[..., Any]

POLICY_VARIABLE = "MCORE_CKPT_EXT_ON_SAVE_FAILURE"
POLICY_ARGUMENT = "ckpt_ext_on_save_failure"
STOP, CONTINUE = "stop", "continue"
_POLL_SECONDS = 0.1
# Whose finalisation functions end with a barrier, after something that rank 0 alone does: `metadata_finalize_fn` and,
# since 0.18, `integrity_finalize_fn`.
_WITH_BARRIER = "megatron.core.dist_checkpointing.serialization"
_OF_TRAINING = "megatron.training"
# Whose writers are known: the strategies `mcore` and `nvrx`.
_WATCHED = ("megatron.", "nvidia_resiliency_ext.")


@dataclass
class Save:
    """One save of this job, on this rank."""

    iteration: int
    folder: Path
    tracker: Path
    tracker_text: str
    asynchronous: bool
    record: Callable[[SaveRecord], str]
    began: float = field(default_factory=time.monotonic)
    stalled: float = 0.0
    bytes: int = 0
    line: str = ""
    report: Report = field(default_factory=Report)

    @property
    def scratch(self) -> Path:
        """Where Megatron writes its tracker file; ours is written in one step, when it is true."""
        return self.tracker.with_name(SCRATCH_TRACKER)


@dataclass(frozen=True)
class _Publication:
    """The last step of a save, on rank 0: training does not wait for the disk to keep what all ranks have written."""

    save: Save
    own: Sequence[Function]
    problem: Future[str | None]


# The save that is being planned, or finalised, by the calls beneath; and those that writers are at work on.
_active: Save | None = None
_under_way: list[Save] = []
# Those whose publication began, and whose end not every rank knows; on rank 0 the one at work, and what failed.
_untold: list[Save] = []
_publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publishing")
_publication: _Publication | None = None
_unpublished: list[str] = []


@contextlib.contextmanager
def _activated(save: Save) -> Iterator[None]:
    global _active
    _active, before = save, _active
    try:
        yield
    finally:
        _active = before


def run_save(scope: Mapping[str, Any], save: Save, stock: Callable[[], Any]) -> Any:
    """Run one `save_checkpoint` of Megatron so that its checkpoint is whole or not there.

    Args:
        scope: the globals of Megatron's checkpointing module.
        save: what is saved, and where.
        stock: the original, with all its arguments.

    Raises:
        SaveFailedError: on every rank, unless the user wants to go on without.
    """
    reason = told_to_all(_attempt(lambda: _begin(save)) if is_first_rank() else None)
    _untold.clear()
    if reason:
        return _failed(SaveFailedError(f"iteration {save.iteration} cannot be saved to {save.folder}:\n  {reason}"))
    tracker_name = "get_checkpoint_tracker_filename"
    module: dict[str, Any] = scope  # type: ignore[assignment]  # a module's globals
    original = module[tracker_name]
    # A synchronous save may delete an older one as soon as it has written the tracker: then that must be the real one.
    keeps_all = getattr(scope["get_args"](), "save_retain_interval", None) is None
    redirected = is_first_rank() and (save.asynchronous or keeps_all)
    if redirected:
        module[tracker_name] = lambda *_, **__: str(save.scratch)
    try:
        with _activated(save):
            result = stock()
    except CheckpointException as error:
        return _failed(SaveFailedError(f"iteration {save.iteration} was not saved: {_text_of(error)}"), [save])
    except SaveFailedError as error:
        return _failed(error, [save])
    finally:
        module[tracker_name] = original
    save.stalled = time.monotonic() - save.began
    if not save.asynchronous:
        reason = told_to_all(_attempt(lambda: _publish(save, tracker=redirected)) if is_first_rank() else None)
        if reason:
            return _failed(SaveFailedError(f"iteration {save.iteration} was not saved:\n  {reason}"), [save])
        if is_first_rank():
            announce(save.line)
            _remove(save.scratch)
    return result


def _begin(save: Save) -> None:
    """On rank 0: see to it that the save before is published, and that this one has a place.

    Raises:
        SaveFailedError: the save before is not published.
        OSError: the disk refuses this one.
    """
    _end_publication(wait=True)
    if problem := _failed_publications():
        raise SaveFailedError(problem)
    prepare(save.folder, save.tracker)


def _start_scratch(save: Save) -> None:
    """Megatron reads the tracker before it writes it, to find what it may delete: it must find the present one."""
    with contextlib.suppress(OSError):
        shutil.copyfile(save.tracker, save.scratch)


def _publish(save: Save, tracker: bool = True) -> None:
    """On rank 0, once all files are written: flush, record, point the tracker to it.

    Raises:
        OSError: the disk refuses; the tracker names what it named.
    """
    settle(save.folder)
    taken = time.monotonic() - save.began
    background = max(0.0, taken - save.stalled) if save.asynchronous else 0.0
    sidecar = save.record(SaveRecord(save.asynchronous, save.bytes, round(save.stalled, 4), round(background, 4)))
    publish(save.folder, sidecar, save.tracker if tracker else None, save.tracker_text)
    save.line = (
        f"iteration {save.iteration} is complete on disk: {save.bytes / 1e6:,.1f} MB in {save.folder}, "
        f"training stalled {save.stalled:.2f} s, {background:.2f} s in the background"
    )


def wrap_schedule_async_save(original: Function) -> Function:
    """Around `schedule_async_save`: watch over the writer, and finalise so that no rank is left waiting."""

    @functools.wraps(original)
    def schedule_async_save(async_request: Any, *positional: Any, **keywords: Any) -> Any:
        save = _active
        if save is None:
            return original(async_request, *positional, **keywords)
        if async_request.finalize_fns:
            steps = list(async_request.finalize_fns)
            async_request.finalize_fns[:] = [functools.partial(_finalize, save, steps)]
        module = inspect.getmodule(inspect.unwrap(original))
        if module is not None and type(async_request).__module__.startswith(_WATCHED):
            with watched_start(module):
                result = original(_observed(async_request, save), *positional, **keywords)
            watch_last(module, lambda problem: _with_report(problem, _under_way[0]) if _under_way else problem)
        else:
            result = original(async_request, *positional, **keywords)
        if async_request.finalize_fns:
            _under_way.append(save)
        return result

    return schedule_async_save


def _observed(request: Any, save: Save) -> Any:
    """The request with what its writer does reported; a field that is not there, or empty, stays so."""
    names = [name for name in ("async_fn", "preload_fn") if getattr(request, name, None) is not None]
    return request._replace(**{name: save.report.observed(getattr(request, name)) for name in names})


class _NotFinalisedError(SaveFailedError):
    """The writers are done, but this save is not whole; raised on every rank."""

    def __init__(self, what: str, save: Save) -> None:
        super().__init__(what)
        self.save = save


def wrap_maybe_finalize_async_save(original: Function) -> Function:
    """Around `maybe_finalize_async_save`: never wait for what cannot come, and end a failed save as the user chose."""
    signature = inspect.signature(original)  # training asks at every step

    @functools.wraps(original)
    def maybe_finalize_async_save(*positional: Any, **keywords: Any) -> Any:
        call = signature.bind(*positional, **keywords)
        call.apply_defaults()
        module = inspect.getmodule(inspect.unwrap(original))
        stock = functools.partial(original, *positional, **keywords)
        _end_publication(wait=False)
        if module is None or not call.arguments["blocking"]:
            return stock() if module is None or not _under_way else _finalized(module, stock)
        while _under_way and not module.is_empty_async_queue():
            _finalized(module, functools.partial(original, blocking=False))
            time.sleep(_POLL_SECONDS if _under_way else 0)
            for save in _under_way:
                save.stalled += _POLL_SECONDS
        _tell_of_publications()
        with watched_end(module) if call.arguments.get("terminate") else contextlib.nullcontext():
            return stock()

    return maybe_finalize_async_save


def _finalized(module: ModuleType, stock: Callable[[], Any]) -> Any:
    try:
        return stock()
    except WriterLostError as error:
        lost = list(_under_way)
        names = ", ".join(str(save.iteration) for save in lost)
        renew_writers(module)
        drop_results()
        return _failed(SaveFailedError(f"iteration {names} was not saved:\n  {error}"), lost)
    except _NotFinalisedError as error:
        if _under_way == [error.save]:  # others hold the same queue
            drop_results()
        return _failed(error, [error.save])


def _finalize(save: Save, steps: Sequence[Function]) -> None:
    """What Megatron does when all writers are done, with every rank's errors told to all before the tracker moves.

    Args:
        save: the save.
        steps: Megatron's own finalisation functions on this rank.

    Raises:
        SaveFailedError: on every rank.
    """
    began = time.monotonic()
    shared = [step for step in steps if not step.__module__.startswith(_OF_TRAINING)]
    own = [step for step in steps if step.__module__.startswith(_OF_TRAINING)]
    problem = None
    with _activated(save):
        for step in shared:
            if problem is None:
                problem = _attempt(step)
            if problem is not None and step.__module__ == _WITH_BARRIER:
                dist.barrier()
    reason = told_to_all(None if problem is None else _with_report(problem, save))
    save.stalled += time.monotonic() - began
    if reason is not None:
        raise _NotFinalisedError(f"iteration {save.iteration} was not saved:\n  {reason}", save)
    _under_way.remove(save)
    _untold.append(save)
    if is_first_rank():
        _begin_publication(save, own)
    else:
        _do_own(save, own)


def _do_own(save: Save, steps: Sequence[Function]) -> None:
    """What the training script does of itself after a save: its log, its tracker file, older checkpoints to delete.

    None of it communicates: `save_checkpoint`, megatron/training/checkpointing.py; read in core_v0.7.0, 0.12.3, 0.16.1
    and 0.19.0.
    """
    for step in steps:
        if (failure := _attempt(step)) is not None:
            announce(f"iteration {save.iteration} is saved, but then: {failure}", every_rank=True)


def _begin_publication(save: Save, own: Sequence[Function]) -> None:
    """On rank 0: flush, record and point the tracker to it, beside the training that goes on."""
    global _publication
    _end_publication(wait=True)
    _start_scratch(save)
    _publication = _Publication(save, own, _publisher.submit(_attempt, functools.partial(_publish, save)))


def _end_publication(wait: bool) -> None:
    """On rank 0, where a publication is at its end: say so, and do what waited for it. Other ranks have none."""
    global _publication
    done = _publication
    if done is None or not (wait or done.problem.done()):
        return
    _publication = None
    if (problem := done.problem.result()) is not None:
        _unpublished.append(f"iteration {done.save.iteration} was not saved: {problem}")
        _clear_away([done.save])
        return
    announce(done.save.line)
    _do_own(done.save, done.own)
    _remove(done.save.scratch)


def _failed_publications() -> str | None:
    """On rank 0: which saves could not be published, and why; asked once."""
    text = "; ".join(_unpublished)
    _unpublished.clear()
    return text or None


def _tell_of_publications() -> None:
    """Wait for what is being published, and let every rank know what came of it.

    Raises:
        SaveFailedError: on every rank, unless the user wants to go on without.
    """
    if not _untold:  # the same on every rank
        return
    _untold.clear()
    _end_publication(wait=True)
    reason = told_to_all(_failed_publications())
    if reason is not None:
        _failed(SaveFailedError(reason.removeprefix("rank 0: ")))


def wrap_save_state_dict_async_finalize(original: Function) -> Function:
    """Around the step that writes the index: rank 0's errors reach all ranks, and every file is looked at.

    Where `finish` raises on rank 0, stock leaves the others in a broadcast for ever.
    """

    @functools.wraps(original)
    def save_state_dict_async_finalize(
        storage_writer: Any, global_metadata: Any, dist_wrapper: Any, *positional: Any, **keywords: Any
    ) -> Any:
        troubles: list[str] = []
        finish, retrieve = storage_writer.finish, storage_writer.retrieve_write_results

        def guarded_finish(metadata: Any, results: Any) -> None:
            trouble = _attempt(lambda: finish(metadata, results))
            if trouble is not None:
                troubles.append(trouble)
            elif _active is not None:
                troubles.extend(problems_on_disk(metadata, _active.folder))
                _active.bytes = stored_bytes(metadata)

        def guarded_retrieve() -> Any:
            try:
                return retrieve()
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank's answer
                # Its words only: frames of `multiprocessing` in a cycle of references crash CPython's collector
                # ("deallocated BytesIO object has exported buffers").
                return _wrap_exception(RuntimeError(_text_of(error)))

        storage_writer.finish, storage_writer.retrieve_write_results = guarded_finish, guarded_retrieve
        try:
            result = original(storage_writer, global_metadata, dist_wrapper, *positional, **keywords)
        finally:
            del storage_writer.finish, storage_writer.retrieve_write_results
        reason = "; ".join(troubles[:3]) or None
        if _active is None or not _active.asynchronous:  # otherwise `_finalize` tells all, once for all its steps
            reason = told_to_all(reason)
        if reason is not None:
            raise SaveFailedError(reason)
        return result

    return save_state_dict_async_finalize


def _attempt(work: Callable[[], object]) -> str | None:
    """Do it; what went wrong, in one line, or None."""
    try:
        work()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - told to all ranks by the caller
        return _text_of(error)
    return None


def _text_of(error: BaseException) -> str:
    """A user's error as it is, one of another kind with its class; of Megatron's collected ones, each rank's last line.

    On ranks other than 0 Megatron's says nothing.
    """
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _with_report(problem: str, save: Save) -> str:
    """The problem, and what the writer itself said of it."""
    said = save.report.read()
    return f"{problem}\n    it said: {said}".replace("\n", "\n    ") if said else problem


def _failed(error: SaveFailedError, saves: Sequence[Save] = ()) -> None:
    """Clear away what is left of failed saves, and go on or stop, as the user chose; the same on every rank.

    Raises:
        SaveFailedError: the user did not choose to go on.
    """
    for save in saves:
        if save in _under_way:
            _under_way.remove(save)
    if is_first_rank():
        _clear_away(saves)
    if policy() == CONTINUE:
        announce(f"{error}; training goes on, the next checkpoint is tried as planned")
        return
    raise SaveFailedError(
        str(error),
        helps=f"--{POLICY_ARGUMENT.replace('_', '-')} continue (or {POLICY_VARIABLE}=continue) lets training go on; "
        "earlier checkpoints are untouched",
    ) from None


def _clear_away(saves: Sequence[Save]) -> None:
    """What failed saves left, on rank 0."""
    discard(save.folder for save in saves if tracked(save.tracker) != save.iteration)
    for save in saves:
        _remove(save.scratch)


def policy() -> str:
    """`continue` or `stop`: the user's argument, else the environment's, else `stop`, as stock where it notices."""
    arguments = sys.modules["megatron.training"].get_args()
    chosen = getattr(arguments, POLICY_ARGUMENT, None) or os.environ.get(POLICY_VARIABLE, STOP)
    return CONTINUE if chosen == CONTINUE else STOP


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)

