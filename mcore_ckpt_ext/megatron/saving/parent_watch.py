"""Ends a child process when its parent has ended, even by SIGKILL.

`multiprocessing` leaves children of a killed process running: a writer waits for requests forever, and so does the
server process of a `Manager`. A pidfd becomes readable when its process ends (pidfd_open(2), Linux 5.3). It also works
for children of a fork server, whose parent in the kernel is another process: PR_SET_PDEATHSIG would follow that
process, and the thread that forked.
Writer processes import this module, so it imports neither torch nor a framework.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_watching = 0
"""PID of the process that watches its parent; a forked child inherits the number without the thread."""
_forking_for = 0
"""PID of a process that is forking a child which has to end with it; 0 if there is none."""


def end_with_parent() -> None:
    """End this process when the process that started it by `multiprocessing` ends."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing is not None else None
    if parent is None or parent.pid is None:
        return
    _watch(parent.pid, parent.is_alive)


def end_with_starter() -> None:
    """End this process when the process ends that is its parent in the kernel."""
    _watch_starter(os.getppid())


@contextlib.contextmanager
def children_end_with_this_process() -> Iterator[None]:
    """Within this context, processes that this process forks end with it."""
    global _forking_for
    _register()
    _forking_for = os.getpid()
    try:
        yield
    finally:
        _forking_for = 0


@functools.cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_watch_after_fork)


def _watch_after_fork() -> None:
    """Watch the parent if this process was forked in `children_end_with_this_process`."""
    global _forking_for
    parent = _forking_for
    _forking_for = 0
    if parent:
        _watch_starter(parent)


def _watch_starter(parent: int) -> None:
    _watch(parent, lambda: os.getppid() == parent)


def _watch(pid: int, is_alive: Callable[[], bool]) -> None:
    global _watching
    if _watching == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    _watching = os.getpid()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        _end()
    except OSError:  # the kernel lacks this call or does not permit it
        return
    # Another process may have got the number before it was opened.
    if not is_alive():
        _end()
    threading.Thread(target=_wait, args=(descriptor,), name="parent watch", daemon=True).start()


def _wait(descriptor: int) -> None:
    select.select([descriptor], [], [])
    _end()


def _end() -> None:
    """End this process and its forked children, which wait for each other.

    No process is left to report to.
    """
    pid = os.getpid()
    with contextlib.suppress(OSError, ValueError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
