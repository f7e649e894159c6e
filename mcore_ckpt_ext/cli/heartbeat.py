"""Heartbeats of the processes that share a command: when one is killed or stopped, the others end and name it."""

from __future__ import annotations

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

from mcore_ckpt_ext.errors import CheckpointError, format_error
from mcore_ckpt_ext.settings import HEARTBEAT_TIMEOUT

Result = TypeVar("Result")
_LOOKS = 10
"""How often the others are looked at during the timeout."""
_PAUSE = 0.02
_HINT = (
    "start all of them again, a conversion with --resume; "
    f"{HEARTBEAT_TIMEOUT.name} sets the seconds after which a process counts as lost"
)


class Store(Protocol):
    """What is needed of a `torch.distributed.Store`; values are bytes, and are set as text or bytes."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Return a value."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""

    def delete_key(self, key: str) -> bool:
        """Forget a value."""


def _in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Do something in a thread that does not keep the process alive.

    A call of a store blocks while the process that holds it is stopped, and no signal ends it.
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
    """Shows the others that this process is alive, and interrupts its main thread when another one is lost.

    A process is lost when its heartbeat has not changed during several looks in a row. Looks are counted, not seconds:
    where a scheduler suspends and resumes all processes together, none is lost. The interruption is that of Ctrl-C,
    so whatever is being done ends as it does then; leaving the context raises the error.
    """

    def __init__(self, store: Store, rank: int, size: int, holder: int | None) -> None:
        """Use as a context manager, in the main thread.

        Args:
            store: of all processes.
            rank: this process.
            size: how many there are.
            holder: the process that holds the store, and so leaves last; None if it is none of them.

        Attributes:
            names: of all processes, for messages; those of the others have to be set.
        """
        self._store, self._rank, self._size, self._holder = store, rank, size, holder
        self._interval = HEARTBEAT_TIMEOUT.value / _LOOKS
        self.names = [f"process {number}" for number in range(size)]
        self.names[rank] += f" on {socket.gethostname()} (pid {os.getpid()})"
        self._beats = 0
        self._heard = [(b"", 0)] * size
        self._lost: set[int] = set()
        self._problem: str | None = None
        self._is_interrupted = False
        self._has_store = True
        self._is_leaving, self._lock, self._left = False, threading.Lock(), threading.Event()
        self._main = threading.get_ident()
        self._handler_before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Heartbeat:
        """Begin to send heartbeats, and to watch the others."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take leave of the others.

        Raises:
            CheckpointError: another process was lost.
        """
        with self._lock:
            self._is_leaving = True
        signal.signal(signal.SIGINT, self._handler_before)
        was_interrupted = isinstance(error, KeyboardInterrupt)
        reason = "interrupted" if was_interrupted else "" if error is None else format_error(error)
        last_words = self._problem or (f"{self.names[self._rank]} has ended: {reason}" if reason else "")
        if self._has_store:
            with suppress(RuntimeError, TimeoutError):  # nothing can be announced if it is gone now
                _in_thread(lambda: self._leave(last_words)).result(2 * HEARTBEAT_TIMEOUT.value)
        self._left.set()
        if self._problem is not None and (error is None or was_interrupted):
            raise CheckpointError(self._problem, hint=_HINT) from None

    def wait(self, exchange: Callable[[], Result]) -> Result:
        """Return the result of an exchange with the others, however long it takes.

        Raises:
            KeyboardInterrupt: this process was interrupted before; no other waits for what it does to clean up.
            CheckpointError: the process that holds the store has ended.
        """
        if self._is_interrupted:
            raise KeyboardInterrupt
        try:
            return _in_thread(exchange).result()
        except RuntimeError as error:
            raise self._store_is_gone(error) from error

    @property
    def is_over(self) -> bool:
        """Whether this process has left: what still waits for the others may stop."""
        return self._left.is_set()

    def _store_is_gone(self, error: Exception) -> CheckpointError:
        reason = next(iter(str(error).splitlines()), "")
        return CheckpointError(f"{self._name_of_holder()} has ended", found=reason, hint=_HINT)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        if self._problem is not None:
            raise KeyboardInterrupt
        if callable(self._handler_before):
            self._handler_before(number, frame)

    def _watch(self) -> None:
        while not self._left.wait(self._interval):
            look = _in_thread(self._look)
            for _ in range(_LOOKS):
                try:
                    problem = look.result(self._interval)
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

    def _look(self) -> str | None:
        """Send a heartbeat, and look for those of the others; returns why all have to stop, if they have."""
        self._beats += 1
        self._store.set(_alive(self._rank), str(self._beats))
        problem = None
        for rank in range(self._size):
            if rank == self._rank:
                continue
            if last_words := self._value(_ended(rank)):
                problem = problem or last_words.decode()
            if self._store.check([_ended(rank)]):
                continue
            value = self._value(_alive(rank))
            before, looks = self._heard[rank]
            self._heard[rank] = value, looks + 1 if value == before else 0
            if self._heard[rank][1] >= _LOOKS:
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
        """Leave last words; what holds the store waits for the others."""
        self._store.set(_ended(self._rank), last_words)
        while self._rank == self._holder:
            others = set(range(self._size)) - self._lost
            if self._store.check([_ended(rank) for rank in others]):
                return
            time.sleep(_PAUSE)


def _alive(rank: int) -> str:
    return f"alive/{rank}"


def _ended(rank: int) -> str:
    return f"ended/{rank}"


def _silent() -> str:
    return f"has been silent for {HEARTBEAT_TIMEOUT.value:g} s: it was killed or stopped, or its node is unreachable"
