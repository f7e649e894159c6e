"""The writers behind Megatron's strategies; training never waits for one that cannot answer.

It works on `AsyncCallsQueue` and its callers, megatron/core/dist_checkpointing/strategies/async_utils.py, and on the
single queue of a job in megatron/training/async_utils.py; read in core_v0.7.0, 0.12.3, 0.16.1, 0.19.0 and 0.19.2. The
strategy `nvrx` has the same classes in nvidia_resiliency_ext/checkpointing/async_ckpt/core.py; read in 0.6.0.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist

from mcore_ckpt_ext.collectives import highest_of_all, reasons_of_all
from mcore_ckpt_ext.megatron.saving.background_writer import ProcessWatch
from mcore_ckpt_ext.megatron.saving.coordinator import WriterLostError
from mcore_ckpt_ext.megatron.saving.save import Finalize, Save, Step
from mcore_ckpt_ext.patching.overrides import Scope

_POLL_SECONDS = 0.1
# Finalization functions of this module end with a barrier after a step of rank 0: `metadata_finalize_fn` and,
# since 0.18, `integrity_finalize_fn`.
_WITH_BARRIER = "megatron.core.dist_checkpointing.serialization"
# Finalization functions of Megatron's training script do not communicate: `save_checkpoint`, checkpointing.py; read in
# core_v0.7.0, 0.12.3, 0.16.1 and 0.19.0.
_SCRIPT = "megatron.training"


class MegatronWriters:
    """The writers of the strategy `mcore`, the only one up to 0.16.

    Args:
        scope: the globals of megatron/training/async_utils.py.
        warn: logs a line from this rank.
    """

    results = "megatron.core.dist_checkpointing.strategies.filesystem_async"

    def __init__(self, scope: Scope, warn: Callable[[str], None]) -> None:
        self._scope = scope
        self._warn = warn
        self._watches: dict[int, ProcessWatch] = {}

    def take_over(self, request: Any, save: Save, finalize: Finalize) -> Any:
        """Take over a request: a named tuple, with a list to which Megatron appends nothing more."""
        if request.finalize_fns:
            steps = [
                Step(function, function.__module__ == _WITH_BARRIER, function.__module__.startswith(_SCRIPT))
                for function in request.finalize_fns
            ]
            request.finalize_fns[:] = [partial(finalize, steps)]
        names = [name for name in ("async_fn", "preload_fn") if getattr(request, name, None) is not None]
        return request._replace(**{name: save.report.with_errors_reported(getattr(request, name)) for name in names})

    def are_done(self) -> bool:
        """Return True if Megatron's queue is empty."""
        return not self._queue().get_num_unfinalized_calls()

    @contextlib.contextmanager
    def guard_scheduling(self) -> Iterator[None]:
        """Restart a persistent writer that died while idle, and do not wait for a dead one.

        `PersistentAsyncCaller.schedule_async_call` waits without limit until the writer has copied the tensors (`join`
        of `preload_q`, since 0.19 `_persistent_preload_q`).
        """
        caller = self._persistent_caller()
        process = _process_of(caller)
        if process is not None and not process.is_alive() and not self._queue().async_calls:
            self._warn(f"the idle writer (pid {process.pid}) of a rank has died; a new one is started")
            self.renew()  # its results have been read, and the request has the present result queue
            caller = self._persistent_caller()
        with self._impatient(caller, "preload_q"):
            yield

    @contextlib.contextmanager
    def ending_writers(self) -> Iterator[None]:
        """Do not wait for a persistent writer that has died, or dies meanwhile.

        `PersistentAsyncCaller.close` waits without limit for an answer to its last request.
        """
        caller = self._persistent_caller() if self._scope.get("_async_calls_queue") is not None else None
        process = _process_of(caller)
        if process is not None and not process.is_alive():
            self._end(caller)
            caller = None
        with self._impatient(caller, "queue", give_up=lambda: _process_of(caller).kill()):
            yield

    def watch_newest(self, completed: Callable[[str], str]) -> None:
        """Report dead writers in the same collective by which the ranks check that all are done."""
        caller = self._queue().async_calls[-1].async_caller
        if not hasattr(caller, "sync_all_async_calls"):  # up to 0.8
            return
        if (existing_watch := self._watch_of(caller)) is not None:
            existing_watch.renew()

        def sync_all_async_calls(is_alive: int) -> bool:
            watch = self._watch_of(caller)
            problem = None if watch is None else watch.problem(bool(is_alive))
            flags = [int(problem is not None), int(is_alive)]
            is_lost, is_any_alive = highest_of_all(flags)
            if is_lost:
                raise WriterLostError(reasons_of_all(completed(problem) if problem is not None else None))
            return not is_any_alive

        caller.sync_all_async_calls = sync_all_async_calls

    def renew(self) -> None:
        """Give up all writers of this rank and their outstanding results, and start a new queue."""
        queue = self._queue()
        scope = self._scope
        callers = [call.async_caller for call in queue.async_calls]
        if is_persistent := getattr(queue, "persistent", False):
            callers.append(queue._get_async_caller())
        queue.async_calls.clear()
        for caller in {id(caller): caller for caller in callers}.values():
            self._end(caller)
        if hasattr(type(queue), "_persistent_caller"):
            type(queue)._persistent_caller = None
        scope["_async_calls_queue"] = None if is_persistent else type(queue)()
        if is_persistent:
            start = scope["init_persistent_async_worker"]
            needs_rank = "rank" in inspect.signature(start).parameters
            start(dist.get_rank(), "forkserver") if needs_rank else start()
        # The ranks compare the numbers of their calls, and other ranks may keep their queue.
        self._queue().call_idx = queue.call_idx

    def drop_results(self) -> None:
        """Drop this process's queue of results; the next save makes a new one, with a new manager.

        Results of a save that was given up would be taken for the next save's, and the process that has died may be the
        manager.
        """
        module = sys.modules.get(self.results)
        if module is not None and getattr(module, "_results_queue", None) is not None:
            with contextlib.suppress(Exception):
                module._results_queue._manager.shutdown()
            module._results_queue = None  # type: ignore[attr-defined]

    def _queue(self) -> Any:
        return self._scope.get("_get_async_calls_queue", lambda: self._scope["_async_calls_queue"])()

    def _persistent_caller(self) -> Any:
        queue = self._queue()
        return queue._get_async_caller() if getattr(queue, "persistent", False) else None

    def _watch_of(self, caller: Any) -> ProcessWatch | None:
        if (process := _process_of(caller)) is None:
            return None
        watch = self._watches.get(process.pid)
        if watch is None or watch.process is not process:
            rank = dist.get_rank()
            stays = any(hasattr(caller, name) for name in ("comp_q", "_persistent_comp_q"))
            watch = ProcessWatch(process, stays, lambda message: self._warn(f"rank {rank}: {message}"))
            self._watches[process.pid] = watch
        return watch

    @contextlib.contextmanager
    def _impatient(self, caller: Any, name: str, give_up: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Within this context, `join` of a queue of a persistent caller can give up."""
        attributes = [queue for queue in (name, f"_persistent_{name}") if getattr(caller, queue, None) is not None]
        if not attributes:
            yield
            return
        (attribute,) = attributes  # an attribute of the caller, or since 0.19 of its class
        is_own = attribute in vars(caller)
        queue = getattr(caller, attribute)
        setattr(caller, attribute, _ImpatientQueue(queue, lambda: self._watch_of(caller), give_up))
        try:
            yield
        finally:
            setattr(caller, attribute, queue) if is_own else delattr(caller, attribute)

    def _end(self, caller: Any) -> None:
        """Kill a caller's process, and make sure that no process waits for its queues."""
        if (process := _process_of(caller)) is not None:
            self._watches.pop(process.pid, None)
            process.kill()
        for name in ("queue", "preload_q", "comp_q"):
            for holder, attribute in ((caller, name), (type(caller), f"_persistent_{name}")):
                if (queue := getattr(holder, attribute, None)) is not None:
                    queue.cancel_join_thread()
                    if holder is type(caller):
                        setattr(holder, attribute, None)
        if hasattr(type(caller), "_persistent_process"):
            type(caller)._persistent_process = None
        caller.process = None


class ResiliencyWriters(MegatronWriters):
    """The writers of the strategy `nvrx`, of nvidia-resiliency-ext."""

    results = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"

    def renew(self) -> None:
        """Start a new queue as Megatron's does, and attach it to the started writer.

        nvidia-resiliency-ext keeps a started writer at its class, and ends it when the old queue is closed.
        """
        super().renew()
        self._persistent_caller()


class _ImpatientQueue:
    """A joinable queue whose `join` also returns if the process that should empty it cannot."""

    def __init__(self, queue: Any, watch: Callable[[], ProcessWatch | None], give_up: Callable[[], None]) -> None:
        self.queue = queue
        self._watch = watch
        self._give_up = give_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        # Up to 0.16 the writer process is started, and receives its queues, during the first call.
        return _itself, (self.queue,)

    def join(self) -> None:
        """Wait until all items are done, or the writer is given up; the next poll reports that to all ranks."""
        condition = self.queue._cond
        while True:
            # A process that died while it held the lock never releases it.
            if condition.acquire(timeout=_POLL_SECONDS):
                try:
                    if self.queue._unfinished_tasks._semlock._is_zero() or condition.wait(_POLL_SECONDS):
                        return
                finally:
                    condition.release()
            if (watch := self._watch()) is not None and watch.problem(owes=True):
                self._give_up()
                return


def _itself(item: Any) -> Any:
    return item


def _process_of(caller: Any) -> Any:
    """Return the writer process; a caller of 0.19 without writes has its warmed-up process at its class."""
    return getattr(caller, "process", None) or getattr(caller, "_persistent_process", None)
