"""Writing for people: lines and tables to stdout, messages to stderr, JSON for programs.

Names come from the checkpoints of strangers, so control characters are shown, never sent to the terminal.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, TextIO

from mcore_ckpt_ext.errors import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def line(text: str = "") -> None:
    """Write one line of the result."""
    _write(sys.stdout, text)


def message(text: str) -> None:
    """Write a line that is not part of the result."""
    _write(sys.stderr, f"mcore-ckpt: {text}")


def heading(text: str) -> None:
    """Begin a part of the result."""
    line()
    line(text)


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = (), right: Sequence[int] = ()) -> None:
    """Write rows as columns, indented; the columns numbered in `right` end at the right."""
    all_rows: list[Sequence[object]] = [*([header] if header else []), *rows]
    texts = [[printable(str(cell)) for cell in row] for row in all_rows]
    widths = [max(map(len, column)) for column in zip_longest(*texts, fillvalue="")]
    for row in texts:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        line(f"  {'  '.join(cells)}".rstrip())


def as_json(result: DataclassInstance) -> None:
    """Write a result as JSON, in one line."""
    _write(sys.stdout, json_text(asdict(result)))


def json_text(value: object) -> str:
    """JSON as its standard has it: numbers that are not finite become text (`"NaN"`, `"Infinity"`)."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # whoever started the program closed it (`>&-`), and wants the exit code alone
        return
    encoding = stream.encoding or "utf-8"
    # One line, whatever a name in it holds: what follows a line break would pass for a line of this program's own.
    stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
