"""Ends a child process when its parent is gone, however that ended: SIGKILL gives nobody a chance to clean up.

`multiprocessing` leaves children of a killed process running: a writer waits for orders forever, and so does the server
process of a `Manager`. A pidfd becomes readable when its process ends (pidfd_open(2), Linux 5.3), also in children of
a fork server, whose parent in the kernel is another process; PR_SET_PDEATHSIG would follow that one, and the thread
that forked.

This module is imported by writer processes, so it imports neither torch nor a framework.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_watching = 0
"""The process that watches its parent: a forked child has the number, and not the thread."""
_forking_for = 0
"""The process that is forking a child which shall end with it; 0 where none is."""


def end_with_parent() -> None:
    """End this process, if `multiprocessing` started it, as soon as the process that started it has ended."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing is not None else None
    if parent is None or parent.pid is None:
        return
    _watch(parent.pid, parent.is_alive)


@contextlib.contextmanager
def children_end_with_this_process() -> Iterator[None]:
    """Within this context, processes that are forked here end with this one."""
    global _forking_for
    _register()
    _forking_for = os.getpid()
    try:
        yield
    finally:
        _forking_for = 0


_registered = False


def _register() -> None:
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
        _registered = True


def _after_fork() -> None:
    global _forking_for
    parent, _forking_for = _forking_for, 0
    if parent:
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
    except OSError:  # the kernel knows no such call, or does not allow it
        return
    # The number may have been given to another process before it was opened.
    if not is_alive():
        _end()
    threading.Thread(target=_wait, args=(descriptor,), name="parent watch", daemon=True).start()


def _wait(descriptor: int) -> None:
    select.select([descriptor], [], [])
    _end()


def _end() -> None:
    """End this process and what it has forked, which wait for each other; there is nobody left to report to."""
    own = os.getpid()
    with contextlib.suppress(OSError, ValueError):
        for child in Path(f"/proc/{own}/task/{own}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
    os.kill(own, signal.SIGKILL)
