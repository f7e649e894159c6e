"""Fits columns of text to the width of the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

_LEAST = 16
"""The smallest width of a column; if the columns are still too wide, the terminal wraps the lines."""


def terminal_width() -> int | None:
    """Return the width of the terminal, or COLUMNS; None if the output does not go to a terminal."""
    limited = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return shutil.get_terminal_size().columns if limited else None


def fitted(widths: Sequence[int], available: int) -> list[int]:
    """Reduce the widest columns until the sum of widths is at most `available`."""
    found = list(widths)
    while sum(found) > available:
        widest = max(found)
        if widest <= _LEAST:
            break
        next_widest = max([_LEAST, *(width for width in found if width < widest)])
        columns = [number for number, width in enumerate(found) if width == widest]
        excess = sum(found) - available
        less = min(widest - next_widest, max(1, excess // len(columns)))
        for number in columns:
            found[number] -= min(less, max(0, sum(found) - available))
    return found


def wrapped(text: str, width: int) -> list[str]:
    """Wrap a text to lines of at most `width` characters; return at least one line."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False)
