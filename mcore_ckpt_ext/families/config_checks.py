"""Checks of values in `config.json` and of arguments, and the errors for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.job.model_arguments import ModelArguments

Config = Mapping[str, Any]
# More than any model has, and small enough to iterate over.
MOST_COUNTED = 1 << 16


def checked_size(key: str, value: Any, limit: int = MOST_COUNTED) -> int:
    """Check a size in `config.json`, and return it.

    Raises:
        UnsupportedCheckpointError: the value is not a valid size.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
        raise UnsupportedCheckpointError(
            "config.json has an invalid size",
            found=repr(value),
            expected=f"a whole number from 1 to {limit:,}",
            where=key,
        )
    return value


def unrepresentable(key: str, found: Any, expected: str) -> UnsupportedCheckpointError:
    """Return the error for a `config.json` with a value for which Megatron has no arguments."""
    return UnsupportedCheckpointError(
        f"config.json requires something that Megatron's model of this family does not support: {key}",
        found=found,
        expected=expected,
        where="config.json",
        hint="map it with a family of your own (python -m pydoc mcore_ckpt_ext.families.family): --family path.py:Name",
    )


def null_value(key: str, default: Any) -> UnsupportedCheckpointError:
    """Return the error for a null key; transformers keeps null, so Megatron's value would differ.

    Args:
        key: the key.
        default: the value that the class has without the key.
    """
    return UnsupportedCheckpointError(
        "config.json has a key without a value",
        found=f"{key}: null",
        expected=f"a value, or no such key, which means {default}",
        where="config.json",
        hint="set the value used in training",
    )


def checked_divisor(key: str, value: Any, heads: int) -> int:
    """Return the value of a key that has to divide the number of heads.

    Raises:
        UnsupportedCheckpointError: it does not.
    """
    size = checked_size(key, value)
    if heads % size:
        raise unrepresentable(key, size, f"a divisor of {quantity(heads, 'head')}")
    return size


def contradictory(key: str, one: Any, other: Any) -> UnsupportedCheckpointError:
    """Return the error for a `config.json` whose keys contradict each other."""
    return UnsupportedCheckpointError(
        f"config.json contradicts itself: {key}",
        found=f"{one}, and {other}",
        expected="one value",
        where="config.json",
        hint="keep the value used in training",
    )


def mismatches(needed: Mapping[str, Any], arguments: ModelArguments) -> list[str]:
    """Return descriptions of arguments that differ from their required value."""
    return [
        f"{name} is {arguments.value(name)!r}, not {value!r}"
        for name, value in needed.items()
        if (arguments.value(name) or None) != (value or None)
    ]
