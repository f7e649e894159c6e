"""Heartbeats of the processes that share a command; if one is lost, the others end and name it."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Protocol, TypeVar

from mcore_ckpt_ext.errors import LostProcessError, format_error
from mcore_ckpt_ext.settings import HEARTBEAT_TIMEOUT

Result = TypeVar("Result")
_CHECKS = 10
"""Number of checks of the other processes during the timeout."""
_PAUSE = 0.02
_HINT = (
    "start all of them again, a conversion with --resume; "
    f"{HEARTBEAT_TIMEOUT.name} sets the seconds after which a process counts as lost"
)


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used; values are bytes, and can be set as strings."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Return a value."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""

    def delete_key(self, key: str) -> bool:
        """Delete a value."""


def _run_in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Run a function in a daemon thread.

    A store call blocks while the process that hosts the store is stopped, and no signal interrupts it.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Heartbeat:
    """Signals that this process is alive, and interrupts its main thread if another process is lost.

    A process is lost if its heartbeat has not changed in several consecutive checks. Checks are counted, not seconds,
    so that no process is lost if a scheduler suspends and resumes all of them together. The main thread is interrupted
    as by Ctrl-C, and leaving the context raises the error.
    """

    def __init__(self, store: Store, rank: int, size: int, holder: int | None) -> None:
        """Create a heartbeat, to be used as a context manager in the main thread.

        Args:
            store: the store of all processes.
            rank: rank of this process.
            size: number of processes.
            holder: rank of the process that hosts the store and therefore leaves last; None if another program hosts
                it.

        Attributes:
            names: names of all processes, for messages; the caller sets those of the other processes.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._holder = holder
        self._interval = HEARTBEAT_TIMEOUT.value / _CHECKS
        self.names = [f"process {number}" for number in range(size)]
        self.names[rank] += f" on {socket.gethostname()} (pid {os.getpid()})"
        self._beats = 0
        self._heard = [(b"", 0)] * size
        self._lost: set[int] = set()
        self._problem: str | None = None
        self._is_interrupted = False
        self._has_store = True
        self._is_leaving = False
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._main = threading.get_ident()
        self._handler_before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Heartbeat:
        """Start sending heartbeats and checking the other processes."""
        signal.signal(signal.SIGINT, self._handle_interrupt)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Announce the end of this process to the others.

        Raises:
            LostProcessError: another process was lost.
        """
        with self._lock:
            self._is_leaving = True
        signal.signal(signal.SIGINT, self._handler_before)
        was_interrupted = isinstance(error, KeyboardInterrupt)
        reason = "interrupted" if was_interrupted else "" if error is None else format_error(error)
        last_words = self._problem or (f"{self.names[self._rank]} has ended: {reason}" if reason else "")
        if self._has_store:
            with suppress(RuntimeError, TimeoutError):  # the store may be gone
                _run_in_thread(lambda: self._leave(last_words)).result(2 * HEARTBEAT_TIMEOUT.value)
            if last_words:
                atexit.register(self._wait_for_reports)
        self._left.set()
        if self._problem is not None and (error is None or was_interrupted):
            raise LostProcessError(self._problem, hint=_HINT) from None

    def wait(self, exchange: Callable[[], Result]) -> Result:
        """Wait for the result of an exchange with the other processes, without a time limit.

        Raises:
            KeyboardInterrupt: this process was interrupted; the others do not wait for its cleanup.
            LostProcessError: the process that hosts the store has ended.
        """
        if self._is_interrupted:
            raise KeyboardInterrupt
        try:
            return _run_in_thread(exchange).result()
        except RuntimeError as error:
            raise self._store_is_gone(error) from error

    @property
    def is_over(self) -> bool:
        """True if this process has announced its end, so that waiting for the others may stop."""
        return self._left.is_set()

    def _store_is_gone(self, error: Exception) -> LostProcessError:
        reason = next(iter(str(error).splitlines()), "")
        return LostProcessError(f"{self._name_of_holder()} has ended", found=reason, hint=_HINT)

    def _handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        if self._problem is not None:
            raise KeyboardInterrupt
        if callable(self._handler_before):
            self._handler_before(number, frame)

    def _watch(self) -> None:
        while not self._left.wait(self._interval):
            check = _run_in_thread(self._beat_and_check)
            for _ in range(_CHECKS):
                try:
                    problem = check.result(self._interval)
                    break
                except TimeoutError:
                    continue
                except RuntimeError as error:
                    self._has_store = False
                    self._interrupt(self._store_is_gone(error).message)
                    return
            else:
                self._has_store = False
                self._interrupt(f"{self._name_of_holder()} {_silent()}")
                return
            if problem:
                self._interrupt(problem)

    def _beat_and_check(self) -> str | None:
        """Send a heartbeat, and check those of the others; return the reason to stop, if there is one."""
        self._beats += 1
        self._store.set(_alive(self._rank), str(self._beats))
        problem = None
        for rank in range(self._size):
            if rank == self._rank:
                continue
            if last_words := self._value(_end_key(rank)):
                problem = problem or last_words.decode()
            if self._store.check([_end_key(rank)]):
                continue
            value = self._value(_alive(rank))
            before, unchanged = self._heard[rank]
            self._heard[rank] = value, unchanged + 1 if value == before else 0
            if self._heard[rank][1] >= _CHECKS:
                self._lost.add(rank)
                problem = problem or f"{self.names[rank]} {_silent()}"
        return problem

    def _value(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def _name_of_holder(self) -> str:
        return "the process that holds the store of all" if self._holder is None else self.names[self._holder]

    def _interrupt(self, problem: str) -> None:
        with self._lock:
            if self._problem is None and not self._is_leaving:
                self._problem = problem
                signal.pthread_kill(self._main, signal.SIGINT)

    def _leave(self, last_words: str) -> None:
        """Store the last message of this process, and wait for those that have to end before it.

        The process that hosts the store waits for all others. If nothing has failed, these wait for the first process,
        which reports: torchrun ends the processes that remain once one has ended with an exit code other than 0.
        """
        self._store.set(_end_key(self._rank), last_words)
        awaited = set(range(self._size)) if self._rank == self._holder else set() if last_words else {0}
        while not self._store.check([_end_key(rank) for rank in {self._rank, *awaited} - self._lost]):
            time.sleep(_PAUSE)

    def _wait_for_reports(self) -> None:
        """Wait, after this process has reported its error, for those of the others.

        torchrun ends all processes within 0.1 s once one has ended with an exit code other than 0
        (`monitor_interval` of `LaunchConfig`, torch/distributed/launcher/api.py, 2.4 to 2.13).
        """

        def wait() -> None:
            self._store.set(_report_key(self._rank), "")
            while not all(self._has_reported(rank) for rank in {*range(self._size)} - self._lost):
                time.sleep(_PAUSE)

        with suppress(RuntimeError, TimeoutError, KeyboardInterrupt):
            _run_in_thread(wait).result(HEARTBEAT_TIMEOUT.value)

    def _has_reported(self, rank: int) -> bool:
        """Return whether a process has reported its error, or has ended without one."""
        has_nothing_to_report = self._store.check([_end_key(rank)]) and not self._store.get(_end_key(rank))
        return has_nothing_to_report or self._store.check([_report_key(rank)])


def _alive(rank: int) -> str:
    return f"alive/{rank}"


def _end_key(rank: int) -> str:
    return f"ended/{rank}"


def _report_key(rank: int) -> str:
    return f"reported/{rank}"


def _silent() -> str:
    return f"has been silent for {HEARTBEAT_TIMEOUT.value:g} s: it was killed or stopped, or its node is unreachable"
