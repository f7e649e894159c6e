"""The width of the terminal, and columns that fit it: pure arithmetic on texts but for the width itself."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

_LEAST = 16
"""Columns are not made narrower than this: what is still too wide then, the terminal itself breaks."""


def terminal_width() -> int | None:
    """Return the number of columns of the terminal, or of COLUMNS; None where output goes elsewhere: no limit."""
    limited = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return shutil.get_terminal_size().columns if limited else None


def fitted(widths: Sequence[int], available: int) -> list[int]:
    """Return widths whose sum is at most `available`, taken from the widest columns; narrow columns keep theirs."""
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
    """Return the text in lines of at most `width` characters, at least one."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False)
