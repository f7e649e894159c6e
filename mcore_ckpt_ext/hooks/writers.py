"""Megatron's background writers from the training process: none is waited for that cannot answer, all can be replaced.

Works on `AsyncCallsQueue` and its callers, megatron/core/dist_checkpointing/strategies/async_utils.py, and on the one
queue of a job in megatron/training/async_utils.py; read in core_v0.7.0, 0.12.3, 0.16.1, 0.19.0 and 0.19.2. The strategy
`nvrx` has the same classes in nvidia_resiliency_ext/checkpointing/async_ckpt/core.py; read in 0.6.0.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt_ext.errors import SaveFailedError
from mcore_ckpt_ext.hooks.announce import announce
from mcore_ckpt_ext.online.agreement import reasons_of_all
from mcore_ckpt_ext.online.writer import WriterWatch

_POLL_SECONDS = 0.1
# Added to what ranks sum up when they ask whether all writers are done: more than there are ranks.
_FAILED = 1 << 24
# The modules with a queue of results, each the only one of its strategy in a process.
_WITH_RESULTS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
_watches: dict[int, WriterWatch] = {}


@contextlib.contextmanager
def watched_start(module: ModuleType) -> Iterator[None]:
    """While a request is handed over: start anew a persistent writer that died idle, and do not wait for a dead one.

    `PersistentAsyncCaller.schedule_async_call` waits without limit until the writer has copied the tensors (`join` of
    `preload_q`, since 0.19 `_persistent_preload_q`).
    """
    caller = _persistent_caller(module)
    process = _process_of(caller)
    if process is not None and not process.is_alive() and not _queue_of(module).async_calls:
        announce(f"the idle writer (pid {process.pid}) of a rank has died; a new one is started", every_rank=True)
        renew_writers(module)  # what it wrote has been taken up, and the request holds the present queue of results
        caller = _persistent_caller(module)
    with _impatient(caller, "preload_q"):
        yield


@contextlib.contextmanager
def watched_end(module: ModuleType) -> Iterator[None]:
    """While a persistent writer is sent home: do not wait for one that has died, now or while it is waited for.

    `PersistentAsyncCaller.close` waits without limit for an answer to its last order.
    """
    caller = _persistent_caller(module) if getattr(module, "_async_calls_queue", None) is not None else None
    process = _process_of(caller)
    if process is not None and not process.is_alive():
        _end(caller)
        caller = None
    with _impatient(caller, "queue", give_up=lambda: _process_of(caller).kill()):
        yield


@contextlib.contextmanager
def _impatient(caller: Any, name: str, give_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within it, `join` of one of the queues of a persistent caller, its own or since 0.19 its class's, can give up."""
    names = [found for found in (name, f"_persistent_{name}") if getattr(caller, found, None) is not None]
    if not names:
        yield
        return
    (attribute,) = names
    is_own, queue = attribute in vars(caller), getattr(caller, attribute)
    setattr(caller, attribute, _ImpatientQueue(queue, lambda: _watch_of(caller), give_up))
    try:
        yield
    finally:
        if is_own:
            setattr(caller, attribute, queue)
        else:
            delattr(caller, attribute)


class _ImpatientQueue:
    """A joinable queue whose `join` returns, too, when the process that should empty it cannot."""

    def __init__(self, queue: Any, watch: Callable[[], WriterWatch | None], give_up: Callable[[], None]) -> None:
        self.queue, self._watch, self._give_up = queue, watch, give_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        # Up to 0.16 the writer process is started, and gets its queues, during the first call.
        return _itself, (self.queue,)

    def join(self) -> None:
        """Wait until everything is done, or the writer is given up; the next look at it then tells all ranks."""
        condition = self.queue._cond
        while True:
            # Who died while it held the lock never gives it back.
            if condition.acquire(timeout=_POLL_SECONDS):
                try:
                    if self.queue._unfinished_tasks._semlock._is_zero() or condition.wait(_POLL_SECONDS):
                        return
                finally:
                    condition.release()
            watch = self._watch()
            if watch is not None and watch.problem(owes=True):
                self._give_up()
                return


def _itself(item: Any) -> Any:
    return item


def _queue_of(module: ModuleType) -> Any:
    return getattr(module, "_get_async_calls_queue", lambda: module._async_calls_queue)()


def _persistent_caller(module: ModuleType) -> Any:
    queue = _queue_of(module)
    return queue._get_async_caller() if getattr(queue, "persistent", False) else None


def _process_of(caller: Any) -> Any:
    """The writer process; a caller of 0.19 that has not yet written anything knows its warmed-up one by its class."""
    return getattr(caller, "process", None) or getattr(caller, "_persistent_process", None)


def _watch_of(caller: Any) -> WriterWatch | None:
    process = _process_of(caller)
    if process is None:
        return None
    known = _watches.get(process.pid)
    if known is None or known.process is not process:
        rank = dist.get_rank()
        stays = any(hasattr(caller, name) for name in ("comp_q", "_persistent_comp_q"))
        _watches[process.pid] = WriterWatch(
            process, stays, lambda what: announce(f"rank {rank}: {what}", every_rank=True)
        )
    return _watches[process.pid]


def watch_last(module: ModuleType, completed: Callable[[str], str]) -> None:
    """Have the ranks tell each other of dead writers in the very sum by which they ask whether all are done.

    Args:
        module: Megatron's `async_utils`, which has just handed over a request.
        completed: adds to a problem what the writer itself said of it.
    """
    caller = _queue_of(module).async_calls[-1].async_caller
    if not hasattr(caller, "sync_all_async_calls"):  # up to 0.8
        return
    watch = _watch_of(caller)
    if watch is not None:
        watch.renew()

    def sync_all_async_calls(is_alive: int) -> bool:
        watch = _watch_of(caller)
        problem = None if watch is None else watch.problem(bool(is_alive))
        state = torch.tensor(
            [int(is_alive) + (_FAILED if problem else 0)], dtype=torch.int, device=torch.cuda.current_device()
        )
        dist.all_reduce(state)
        total = int(state.item())
        if total >= _FAILED:
            raise WriterLostError(reasons_of_all(completed(problem) if problem else None))
        return total == 0

    caller.sync_all_async_calls = sync_all_async_calls


class WriterLostError(SaveFailedError):
    """Some rank's writer is gone or stuck; raised on every rank."""


def renew_writers(module: ModuleType) -> None:
    """Give up all writers of this rank and what they still owe, and start with a new queue."""
    queue = _queue_of(module)
    callers = [call.async_caller for call in queue.async_calls]
    if getattr(queue, "persistent", False):
        callers.append(queue._get_async_caller())
    queue.async_calls.clear()
    for caller in {id(caller): caller for caller in callers}.values():
        _end(caller)
    if hasattr(type(queue), "_persistent_caller"):
        type(queue)._persistent_caller = None
    module._async_calls_queue = None  # type: ignore[attr-defined]
    if getattr(queue, "persistent", False):
        start = module.init_persistent_async_worker
        needs_rank = "rank" in inspect.signature(start).parameters
        start(dist.get_rank(), "forkserver") if needs_rank else start()
    else:
        module._async_calls_queue = type(queue)()  # type: ignore[attr-defined]
    # The ranks compare the numbers of their calls, and not every rank may have had to start anew.
    _queue_of(module).call_idx = queue.call_idx
    # nvrx keeps a started writer at its class until it is asked for; the old queue sends that one home when it goes.
    _persistent_caller(module)


def _end(caller: Any) -> None:
    """Kill a caller's process, and see to it that nobody waits for what it leaves."""
    process = _process_of(caller)
    if process is not None:
        _watches.pop(process.pid, None)
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


def drop_results() -> None:
    """Forget the queue of results; the next save makes a new one, with a new manager.

    What a writer put into it for a save that is given up would be taken for the next one's; and the process that
    manages it may be what has died.
    """
    for name in _WITH_RESULTS:
        module = sys.modules.get(name)
        results = getattr(module, "_results_queue", None)
        if results is not None:
            with contextlib.suppress(Exception):
                results._manager.shutdown()
            module._results_queue = None  # type: ignore[union-attr]
