"""Fits columns of text to the width of the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

_LONG = 32
"""The length of the longest word, such as a format's name, that is never broken; a path may be longer."""

_LEAST = 16
"""The smallest width of a column; if the columns are still too wide, the terminal wraps the lines."""


def terminal_width() -> int | None:
    """Return the width of the terminal, or COLUMNS; None if the output does not go to a terminal."""
    limited = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return shutil.get_terminal_size().columns if limited else None


def fit_widths(columns: Sequence[Sequence[str]], available: int) -> list[int]:
    """Return the widths of columns of text that fit in `available` characters.

    The widest columns are reduced, but not below their longest word, unless it is very long.
    """
    widths = [max(map(len, column)) for column in columns]
    least = [_least_width(column) for column in columns]
    while sum(widths) > available:
        reducible = [number for number, width in enumerate(widths) if width > least[number]]
        if not reducible:
            break
        widths[max(reducible, key=widths.__getitem__)] -= 1
    return widths


def _least_width(column: Sequence[str]) -> int:
    words = (len(word) for text in column for word in text.split())
    return max([_LEAST, *(length for length in words if length <= _LONG)])


def wrap_lines(text: str, width: int) -> list[str]:
    """Wrap a text to lines of at most `width` characters; return at least one line."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False)
