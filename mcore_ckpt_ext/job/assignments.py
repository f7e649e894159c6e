"""Parses arguments of a job that a user passes on the command line as `NAME=VALUE`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt_ext.errors import UsageError, shorten

# Python's spelling, which Megatron uses in its list of arguments; JSON has another.
_WORDS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Parse assignments to arguments by name.

    A value that is neither JSON nor True, False or None is a string.

    Args:
        texts: texts of the form `NAME=VALUE`, such as `num_layers=32` or `swiglu=True`.

    Raises:
        UsageError: a text does not have this form, or a name is given twice.
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
