"""Parses arguments of a job that a user passes on the command line as `NAME=VALUE`."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt_ext.errors import UsageError, shorten
from mcore_ckpt_ext.job.arguments.kinds import MOST_LAYERS

# Python's spelling, which Megatron uses in its list of arguments; JSON has another.
_WORDS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}
_LONGEST_PATTERN = 10_000


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Parse assignments to arguments by name.

    A value that is neither JSON, True, False or None, nor a pattern of layers (`([0]*1+[1]*47)`), is a string.

    Args:
        texts: texts of the form `NAME=VALUE`, such as `num_layers=32` or `swiglu=True`.

    Raises:
        UsageError: a text does not have this form, or a name is given twice.
    """
    assignments: dict[str, Any] = {}
    for text in texts:
        name, given, value = text.partition("=")
        if not given or not name.isidentifier():
            raise UsageError("an argument has no name, or no value", found=shorten(text), expected="NAME=VALUE")
        if name in assignments:
            raise UsageError("an argument is given twice", found=shorten(name), expected="each name once")
        try:
            assignments[name] = _WORDS[value] if value in _WORDS else json.loads(value)
        except (ValueError, RecursionError):
            assignments[name] = value if (pattern := _pattern(value)) is None else pattern
    return assignments


def _pattern(text: str) -> list[int] | None:
    """Return the value of an expression of lists of numbers, joined by + and repeated by *, or None.

    Megatron evaluates such texts (`moe_freq_type`, megatron/training/arguments.py, core_v0.10.0 to 0.19.2).
    """
    if "[" not in text or len(text) > _LONGEST_PATTERN:
        return None
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def _value(expression: ast.expr) -> int | list[int]:
    if isinstance(expression, ast.Constant) and type(expression.value) is int:
        return expression.value
    if isinstance(expression, ast.List):
        return [_number(_value(item)) for item in expression.elts]
    if isinstance(expression, ast.BinOp):
        left = _value(expression.left)
        right = _value(expression.right)
        if isinstance(expression.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return _limit(left + right, 1)
        if isinstance(expression.op, ast.Mult):
            layers, times = (left, right) if isinstance(left, list) else (right, left)
            if isinstance(layers, list):
                return _limit(layers, _number(times))
    raise ValueError("no pattern of layers")


def _number(value: int | list[int]) -> int:
    if isinstance(value, list):
        raise ValueError("a list within a list")
    return value


def _limit(layers: list[int], times: int) -> list[int]:
    """Return the repeated list.

    Raises:
        ValueError: it has more layers than any model.
    """
    if len(layers) * times > MOST_LAYERS:
        raise ValueError("more layers than any model has")
    return layers * times
