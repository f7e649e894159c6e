"""The types that values of a stranger's `config.json` may have before they become arguments of a job.

Arguments go on into `run_config.yaml`, where Megatron-Bridge calls what an object's `_target_` names, and where text
may refer to the environment. So each is a number, a plain word, or a list of numbers, as its default is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, printable

_WORD = re.compile(r"[\w.+-]{0,100}")
_SHOWN = 80
_MAY_BE_LISTS = {"moe_layer_freq", "window_size", "window_attn_skip_freq", "no_rope_freq"}


def checked_values(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse arguments of types that they cannot have.

    Args:
        arguments: what a `config.json` led to.
        defaults: of Megatron's arguments; each says of what type its argument is, None says nothing.

    Raises:
        UnsupportedCheckpointError: one has another.
    """
    for name, value in arguments.items():
        default = defaults.get(name)
        if value is None or (_is_plain(value) and (name in _MAY_BE_LISTS or _fits(value, default))):
            continue
        raise UnsupportedCheckpointError(
            "config.json gives a value that is none",
            found=f"{type(value).__name__} {printable(value[:_SHOWN]) if type(value) is str else ''}",
            expected=type(default).__name__ if default is not None else "a number, a word, or a list of numbers",
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


def _fits(value: object, default: object) -> bool:
    if isinstance(default, bool):
        return type(value) is bool
    if isinstance(default, (int, float)):
        return type(value) in (int, float)
    return not isinstance(default, str) or type(value) is str
