"""Arguments of a job that a user states on the command line, as `NAME=VALUE`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt_ext.errors import UsageError, shorten

# As Python, and Megatron in its list of arguments, spells what JSON spells otherwise.
_WORDS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Return arguments by name; a value that is neither JSON nor a word of Python's stays text.

    Args:
        texts: each of the form `NAME=VALUE`, such as `num_layers=32` or `swiglu=True`.

    Raises:
        UsageError: one of them is not of that form, or a name is given twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, given, value = text.partition("=")
        if not given or not name.isidentifier():
            raise UsageError("an argument has no name, or no value", found=shorten(text), expected="NAME=VALUE")
        if name in found:
            raise UsageError("an argument is given twice", found=shorten(name), expected="each name once")
        try:
            found[name] = _WORDS[value] if value in _WORDS else json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found
