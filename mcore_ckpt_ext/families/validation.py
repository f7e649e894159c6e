"""Validates the values of an untrusted `config.json` before they become arguments of a job.

Arguments go on into `run_config.yaml`, where Megatron-Bridge calls what an object's `_target_` names, and where text
may refer to the environment. So each is a number, a plain word (a pattern of layers is one), or a list of numbers.
That each is of its own type, `JobArguments` checks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, shorten

_WORD = re.compile(r"[\w.+*-]{0,1000}")
_SHOWN = 80


def check_plain(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments, made from a `config.json`, that are neither numbers, plain words nor lists of numbers.

    Raises:
        UnsupportedCheckpointError: one of them is something else.
    """
    for name, value in arguments.items():
        if value is not None and not _is_plain(value):
            raise UnsupportedCheckpointError(
                "config.json has a value of an unsupported kind",
                found=shorten(value, _SHOWN) if isinstance(value, str) else type(value).__name__,
                expected="a finite number, a word, or a list of numbers",
                where=f"config.json, for Megatron's {name}",
            )


def _is_plain(value: object) -> bool:
    if type(value) is str:
        return _WORD.fullmatch(value) is not None
    if type(value) in (list, tuple):
        return all(_is_number(item) for item in value)  # type: ignore[attr-defined]  # mypy does not follow `type`
    return _is_number(value)


def _is_number(value: object) -> bool:
    return type(value) in (bool, int) or (type(value) is float and isfinite(value))
