"""Watches the process that writes a checkpoint in the background, and reports its errors.

The writer process imports this module, too, so it imports neither torch nor a framework.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.megatron.saving.parent_watch import end_with_parent
from mcore_ckpt_ext.settings import WRITER_PATIENCE

_REMARKABLE = 10.0
_LOOK_EVERY = 0.5
_OUT_OF_MEMORY = Path("/sys/fs/cgroup/memory.events")
# Loggers of the errors that writers turn into "Worker failure" or a result (filesystem_async.py of Megatron 0.12.3
# to 0.19.2, and of nvidia-resiliency-ext 0.6.0).
_LOGGERS = ("megatron.core.dist_checkpointing", "nvidia_resiliency_ext.checkpointing.async_ckpt")


class Report:
    """A file in which a writer leaves the cause of its failure; it only exists after a failure."""

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir()) / f"mcore_ckpt_ext-{secrets.token_hex(8)}.error"

    def with_errors_reported(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its errors are reported here; another process can unpickle the result."""
        return partial(_observe, work, str(self._path))

    @contextlib.contextmanager
    def record_errors(self) -> Iterator[None]:
        """Record within this scope what writers of this process, and of its children, log as errors.

        In a synchronous save they log the cause, and raise an assertion that names only its class (`check_local_output`
        in `write_preloaded_data_multithread`, filesystem_async.py, core_v0.17.0 to 0.19.2).
        """
        with _append_errors(str(self._path)):
            try:
                yield
            finally:
                self.read()

    def read(self) -> str:
        """Return the output of the writer, which ends with its traceback; empty if there is none."""
        with contextlib.suppress(OSError):
            text = self._path.read_text(errors="replace")
            self._path.unlink()
            return text.strip()
        return ""

    def failure(self) -> str | None:
        """Return that the writer failed, and its output; None if it has reported no failure."""
        problem = "its writer failed"
        return None if (text := self.with_output(problem)) == problem else text

    def with_output(self, problem: str) -> str:
        """Return the problem, followed by the writer's own output."""
        output = self.read()
        return f"{problem}\n    its output: {output}".replace("\n", "\n    ") if output else problem


def _observe(work: Callable[..., Any], path: str, *positional: Any, **keywords: Any) -> Any:
    end_with_parent()
    with _append_errors(path):
        try:
            return work(*positional, **keywords)
        except BaseException:
            _append(path, traceback.format_exc())
            raise


@contextlib.contextmanager
def _append_errors(path: str) -> Iterator[None]:
    """Append to a file what the writers' loggers log as errors within this scope."""
    handler = _ToFile(path)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _ToFile(logging.Handler):
    """Appends error messages to a report."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        _append(self._path, record.getMessage() + "\n")


def _append(path: str, text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not hide the cause
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


class ProcessWatch:
    """Watches one writer process from the training process; each call costs microseconds.

    Args:
        process: a `multiprocessing` process.
        stays: the process continues with other work after this, so that its end is no evidence about this work.
        log: called once when the writer has not moved for ten seconds.
    """

    def __init__(self, process: Any, stays: bool, log: Callable[[str], None]) -> None:
        self.process = process
        self._stays = stays
        self._log = log
        self._out_of_memory = _kills_for_memory()
        self.renew()

    def renew(self) -> None:
        """Start to watch a new piece of work."""
        self._moved = self._looked = time.monotonic()
        self._marks: tuple[object, ...] = ()
        self._is_reported = False

    def problem(self, owes: bool) -> str | None:
        """Return the problem of the writer; None if there is none.

        Args:
            owes: a result of the writer is outstanding, so that even a normal exit is an error.
        """
        if not self.process.is_alive():
            return self._death() if owes or (self.process.exitcode and not self._stays) else None
        if not owes:
            return None
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY:
            self._looked = now
            if killed := _killed_child(self.process.pid):
                return f"a process of its writer (pid {self.process.pid}) was killed by {killed}"
            marks = _signs_of_life(self.process.pid)
            if marks != self._marks:
                self._marks = marks
                self._moved = now
                self._is_reported = False
        return self._silence(now - self._moved)

    def _silence(self, seconds: float) -> str | None:
        state = "stopped by a signal" if self._marks[:1] == ("T",) else "waiting for the disk, or forever"
        problem = f"its writer (pid {self.process.pid}) has not moved for {seconds:.0f} s: {state}"
        if seconds > _REMARKABLE and not self._is_reported:
            self._is_reported = True
            self._log(f"{problem}; it is given up after {WRITER_PATIENCE.value:.0f} s ({WRITER_PATIENCE.name})")
        return problem if seconds > WRITER_PATIENCE.value else None

    def _death(self) -> str:
        pid = self.process.pid
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"its writer (pid {pid}) ended with exit code {code} before it was done"
        cause = f"its writer (pid {pid}) was killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL and _kills_for_memory() > self._out_of_memory:
            cause += ": out of memory, according to the kernel"
        return cause


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kills_for_memory() -> int:
    """Return how often the kernel killed for memory in this control group (version 2); 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in _OUT_OF_MEMORY.read_text().splitlines())
        return int(fields.get("oom_kill", 0))
    return 0


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the state on, see proc(5); empty without such a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _signs_of_life(pid: int) -> tuple[object, ...]:
    """Return the state, processor time and bytes written of the writer and its children."""
    marks: list[object] = []
    for process in (pid, *_children(pid)):
        fields = _stat(process)
        marks += ["T" if fields[:1] == ["T"] else "", *fields[11:13]]
        with contextlib.suppress(OSError):
            marks.append(Path(f"/proc/{process}/io").read_text())
    return tuple(marks)


def _killed_child(pid: int) -> str | None:
    """Return the signal that killed a child of the writer; None if no child was killed.

    Up to 0.16 the writer forks one child per file, and waits for all without limit.
    Source: `write_preloaded_data_multiproc`, filesystem_async.py, core_v0.7.0 to 0.16.1.
    """
    for child in _children(pid):
        fields = _stat(child)
        if fields[:1] == ["Z"] and (number := int(fields[-1]) & 0x7F):
            return _signal_name(number)
    return None
