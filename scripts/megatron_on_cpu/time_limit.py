"""A time limit without the time in which a job waits for a processor.

The limit ends jobs that hang. Such a job sleeps or spins, even on a busy machine. A job that waits for processors is
ready to run, which Linux measures for each thread (`/proc/PID/schedstat`,
see Documentation/scheduler/sched-stats.rst).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_INTERVAL = 1.0
_NANOSECONDS = 1e9
Usage = dict[str, tuple[float, float]]
"""For each thread: seconds that it has run, and seconds that it has waited for a processor."""


class TimeLimit:
    """A context in which `expire` is called when a process group has used its seconds."""

    def __init__(self, group: int, seconds: float, expire: Callable[[], None]) -> None:
        self._group, self._seconds, self._expire = group, seconds, expire
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.charged = 0.0

    def __enter__(self) -> TimeLimit:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        before, then = usage_of(self._group), time.monotonic()
        while not self._ended.wait(min(_INTERVAL, max(0.0, self._seconds - self.charged))):
            after, now = usage_of(self._group), time.monotonic()
            ran, waited = difference(before, after)
            self.charged += charge(now - then, ran, waited, len(os.sched_getaffinity(0)))
            before, then = after, now
            if self.charged >= self._seconds:
                self._expire()
                return


def difference(before: Usage, after: Usage) -> tuple[float, float]:
    """Return the usage of all threads between two measurements, without threads that started or ended."""
    known = [(before[thread], values) for thread, values in after.items() if thread in before]
    ran = sum(max(0.0, now[0] - then[0]) for then, now in known)
    return ran, sum(max(0.0, now[1] - then[1]) for then, now in known)


def charge(elapsed: float, ran: float, waited: float, processors: int) -> float:
    """Return the part of an interval that counts for a job, in seconds.

    Args:
        elapsed: length of the interval.
        ran: processor time of the job's threads.
        waited: time in which they were ready to run but did not.
        processors: number of processors; a job with more threads also waits for itself, which counts.
    """
    possible = min(ran + waited, processors * elapsed)
    lost = max(0.0, possible - ran) / max(1.0, possible / elapsed)
    return max(0.0, elapsed - lost)


def usage_of(group: int) -> Usage:
    """Return the usage of each thread of a process group; empty if the system does not measure it."""
    found: Usage = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end meanwhile.
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            for thread in (folder / "task").iterdir():
                ran, waited = (thread / "schedstat").read_text().split()[:2]
                found[thread.name] = int(ran) / _NANOSECONDS, int(waited) / _NANOSECONDS
    return found
