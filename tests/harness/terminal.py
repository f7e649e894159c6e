"""A terminal that a test reads."""

from __future__ import annotations

import io
import sys

import pytest


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int | None = None) -> Terminal:
    """Replace both streams by one terminal; not a fixture, because pytest replaces the streams after its setup."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    return stream
