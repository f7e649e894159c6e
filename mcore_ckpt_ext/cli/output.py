"""Writes lines, tables and JSON to stdout, and messages to stderr.

Names come from untrusted checkpoints, so control characters are escaped and never sent to the terminal.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePath
from typing import TextIO, TypeAlias

from mcore_ckpt_ext.cli.terminal import fit_widths, terminal_width, wrap_lines
from mcore_ckpt_ext.errors import DETAILS, escape
from mcore_ckpt_ext.storage.store_path import StorePath

_GAP = "  "
# Terminal styles: parameters of "select graphic rendition" (ECMA-48).
GOOD = "32"
BAD = "1;31"
REMARKABLE = "33"
STRONG = "1"
SOFT = "2"


@dataclass(frozen=True, slots=True)
class Painted:
    """A text with a style for terminals; elsewhere only the text is written."""

    text: str
    style: str

    def __str__(self) -> str:
        return self.text


class OutputError(Exception):
    """stdout cannot be written; `cause` is the error of the operating system."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


_Part: TypeAlias = str | Painted


def line(text: str | Painted = "") -> None:
    """Write one line of the result.

    Raises:
        OutputError: stdout cannot be written; likewise for all functions that write to it.
    """
    _write(sys.stdout, [text])


def message(text: str | Painted) -> None:
    """Write a line that is not part of the result."""
    _write(sys.stderr, ["mcore-ckpt: ", text])


_MOST_OF_MESSAGE = 400
_MOST_OF_DETAIL = 240
"""The number of characters above which a message is summarized, and to which its longest details are shortened."""
_ITEM_ENDS = ("; ", ", ", " ")


def summarize(text: str, most: int = _MOST_OF_MESSAGE) -> str:
    """Shorten a text behind one of its items, and name the option that shows all of it."""
    if len(text) <= most:
        return text
    ends = (text.rfind(end, most // 2, most) for end in _ITEM_ENDS)
    end = next((place for place in ends if place > 0), most)
    return f"{text[:end]} ... (in full with --json)"


def error_message(sentence: str, details: Mapping[str, str]) -> None:
    """Write an error: on a terminal with each detail on a line, otherwise in one line, as in a log.

    What was found and expected is shortened in a long message; the place and the hint never are.
    """
    if len(sentence) + sum(map(len, details.values())) > _MOST_OF_MESSAGE:
        sentence = summarize(sentence)
        long = {
            label: summarize(details[label], _MOST_OF_DETAIL) for label in ("found", "expected") if label in details
        }
        details = {**details, **long}
    if sys.stderr is None or not sys.stderr.isatty():
        message("; ".join([f"error: {sentence}", *(f"{label}: {text}" for label, text in details.items())]))
        return
    message(Painted(f"error: {sentence}", BAD))
    width = max(map(len, DETAILS)) + 1
    for label, text in details.items():
        _write(sys.stderr, ["  ", Painted(f"{label}:".ljust(width), SOFT), " ", text])


def heading(text: str) -> None:
    """Write the heading of a part of the result."""
    line()
    line(Painted(text, STRONG))


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = (), right: Sequence[int] = ()) -> None:
    """Write rows as indented columns; the columns with an index in `right` are right-aligned.

    On a terminal the table fits its width: the widest columns are wrapped.
    """
    all_rows: list[Sequence[object]] = [*([[Painted(text, SOFT) for text in header]] if header else []), *rows]
    texts = [[escape(str(cell)) for cell in row] for row in all_rows]
    columns = list(zip_longest(*texts, fillvalue=""))
    terminal = terminal_width()
    widths = fit_widths(columns, sys.maxsize if terminal is None else terminal - len(_GAP) * len(columns))
    for row, of_row in zip(all_rows, texts, strict=True):
        cells = [wrap_lines(text, width) for text, width in zip(of_row, widths, strict=False)]
        for parts in zip_longest(*cells, fillvalue=""):
            _write(sys.stdout, _columns(row, parts, widths, right))


def _columns(row: Sequence[object], texts: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> list[_Part]:
    """Return one line of a row, in the styles of its cells, without trailing spaces."""
    last = max((number for number, text in enumerate(texts) if text), default=-1)
    parts: list[_Part] = []
    for number, (cell, text, width) in enumerate(zip(row[: last + 1], texts, widths, strict=False)):
        ahead = width - len(text) if number in right else 0
        parts += [_GAP + " " * ahead, Painted(text, cell.style) if isinstance(cell, Painted) else text]
        parts += [" " * (width - len(text) - ahead)] if number < last else []
    return parts


def print_json(content: dict[str, object]) -> None:
    """Write an object as JSON, in one line."""
    _write(sys.stdout, [json_text(content)])


def json_text(value: object) -> str:
    """Return standard JSON: numbers that are not finite become strings (`"NaN"`, `"Infinity"`)."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (PurePath, StorePath)):
        return str(value)
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_colorful(stream: TextIO) -> bool:
    """Return whether to use styles: on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _write(stream: TextIO | None, parts: Sequence[str | Painted]) -> None:
    if stream is None:  # the caller closed it (`>&-`), and only needs the exit code
        return
    encoding = stream.encoding or "utf-8"
    shows_styles = _is_colorful(stream)
    texts = []
    for part in parts:
        # Line breaks in names are escaped: the text after them would look like a line of this program.
        text = escape(str(part))
        texts.append(f"\x1b[{part.style}m{text}\x1b[0m" if isinstance(part, Painted) and shows_styles else text)
    try:
        stream.write("".join(texts).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    except OSError as error:
        if stream is sys.stdout:
            raise OutputError(error) from error
        # There is no way to report that stderr cannot be written; the exit code and stdout are still right.


def flush_output() -> None:
    """Flush what was written to stdout.

    Raises:
        OutputError: stdout cannot be written.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        raise OutputError(error) from error
