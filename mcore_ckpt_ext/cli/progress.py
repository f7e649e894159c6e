"""Shows the progress of a transfer on stderr: one updated line on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from mcore_ckpt_ext.communicator import Communicator
from mcore_ckpt_ext.errors import format_bytes

_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 10.0


def _duration(seconds: float) -> str:
    """Return a duration as text: `40 s`, `3 min 20 s` or `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def progress_of(team: Communicator) -> Callable[[int, int], None]:
    """Return a callback for (done, total) in bytes; only the first process shows its progress."""
    return Progress() if team.rank == 0 else lambda done, total: None


class Progress:
    """A callback for (done, total) in bytes, which shows percentage, rate and remaining time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = self._last_update = clock()
        self._first: int | None = None
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Report progress; may be called often."""
        if sys.stderr is None:
            return
        now = self._clock()
        if self._first is None:
            self._first = done  # bytes of an interrupted run do not count for the rate
        every = _TERMINAL_SECONDS if self._terminal else _PLAIN_SECONDS
        if now - self._last_update < every and done < total:
            return
        if not self._terminal and done == total and now - self._begun < _PLAIN_SECONDS:
            return
        self._last_update = now
        rate = (done - self._first) / max(now - self._begun, 1e-6)
        left = (total - done) / rate if rate else 0.0
        share = 100 * done // max(total, 1)
        speed = f"{format_bytes(int(rate))}/s"
        line = f"{share:3d} %  {format_bytes(done)} of {format_bytes(total)}, {speed}, {_duration(left)} left"
        sys.stderr.write(f"\r{line:<78}" if self._terminal else f"{line}\n")
        if self._terminal and done == total:
            sys.stderr.write("\n")
        sys.stderr.flush()
