"""Validates the values of an untrusted `config.json` before they become arguments of a job.

Arguments are copied to `run_config.yaml`. There Megatron-Bridge calls the object that a `_target_` names, and strings
may refer to environment variables. So each value must be a number, a plain word (such as a pattern of layers), or a
list of numbers. The description of layers that differ is JSON of such values. `JobArguments` checks the type of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, shorten

_WORD = re.compile(r"[\w.+*-]{0,1000}")
# JSON without escapes, and without the sign that refers to something else.
_JSON = re.compile(r"\{[\w.+\-{}\[\]\":, ]*\}")
_IS_JSON = "heterogeneous_layers_config_encoded_json"
_SHOWN = 80


def check_plain(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments from a `config.json` that are not numbers, plain words or lists of numbers.

    Raises:
        UnsupportedCheckpointError: a value is something else.
    """
    for name, value in arguments.items():
        is_json = name == _IS_JSON and isinstance(value, str) and _JSON.fullmatch(value) is not None
        if value is not None and not (is_json or _is_plain(value)):
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
