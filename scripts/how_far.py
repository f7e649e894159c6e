"""Shows the progress of a long step in one line of a terminal, with the standard library only."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

_WIDTH = 100
_EVERY = 0.5
_ITERATION = re.compile(r"iteration +(\d+)/ *(\d+)")
_OF_PIP = re.compile(r"^\s*(Collecting|Downloading|Installing|Building)\b.*", re.MULTILINE)
_TAIL_BYTES = 4096


class MovingLine:
    """Shows a text repeatedly, with the elapsed seconds."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._begun = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True) if sys.stdout.isatty() else None

    def __enter__(self) -> MovingLine:
        """Start showing the line."""
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the line."""
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self.clear()

    def clear(self) -> None:
        """Clear the line, so that a permanent line can be written."""
        if self._thread is not None:
            sys.stdout.write("\r" + " " * _WIDTH + "\r")
            sys.stdout.flush()

    def _run(self) -> None:
        while not self._done.wait(_EVERY):
            seconds = time.monotonic() - self._begun
            sys.stdout.write("\r" + f"      {seconds:.0f} s  {self._text()}"[:_WIDTH].ljust(_WIDTH))
            sys.stdout.flush()


class Iterations:
    """A stream for a job's output, which recognizes the progress of the training."""

    def __init__(self) -> None:
        self.text = "starting the ranks"

    def write(self, line: str) -> int:
        """Look for an iteration in a line of output."""
        if match := _ITERATION.search(line):
            self.text = f"iteration {match[1]} of {match[2]}"
        return len(line)

    def flush(self) -> None:
        """Do nothing: there is nothing to flush."""


@contextmanager
def installing(log: Path) -> Iterator[None]:
    """Show the progress of pip while it writes this log."""
    with MovingLine(lambda: _last_of_pip(log)):
        yield


def _last_of_pip(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return "making the environment"
    found = [match[0].strip() for match in _OF_PIP.finditer(text)]
    return found[-1] if found else "pip looks at what is there"
