"""What values an argument of a job can have, in words and as a test: the fields of `arguments.JobArguments`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

MOST_LAYERS = 1 << 16
"""Many times what there has been; a list with an item for each layer is no longer."""


@dataclass(frozen=True)
class Kind:
    """What values an argument can have, in words and as a test."""

    expected: str
    accepts: Callable[[Any], bool]


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return is_whole(value) or (isinstance(value, float) and isfinite(value))


def _is_frequency(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return 0 < len(value) <= MOST_LAYERS and all(isinstance(item, int) and 0 <= item <= 1 for item in value)
    return is_whole(value) and 0 < value <= MOST_LAYERS


def of(kind: Kind) -> Any:
    """A field that is not known until somebody states it."""
    return field(default=None, metadata={"kind": kind})


def whole(most: int) -> Any:
    """A field for a whole number from 0 to `most`."""
    return of(Kind(f"a whole number from 0 to {most:,}", lambda value: is_whole(value) and 0 <= value <= most))


def flag() -> Any:
    """A field for True or False."""
    return of(Kind("True or False", lambda value: isinstance(value, bool)))


def text() -> Any:
    """A field for a text."""
    return of(Kind("a text", lambda value: isinstance(value, str)))


def number() -> Any:
    """A field for a finite number."""
    return of(Kind("a finite number", _is_finite))


def not_negative() -> Any:
    """A field for a finite number that is 0 or more."""
    return of(Kind("a finite number, 0 or more", lambda value: _is_finite(value) and value >= 0))


def above_zero() -> Any:
    """A field for a finite number above 0."""
    return of(Kind("a finite number above 0", lambda value: _is_finite(value) and value > 0))


def numbers() -> Any:
    """A field for a finite number, or several."""

    def accepts(value: Any) -> bool:
        return all(map(_is_finite, value)) if isinstance(value, (list, tuple)) else _is_finite(value)

    return of(Kind("a finite number, or several", accepts))


def frequency() -> Any:
    """A field that says in which layers something is."""
    return of(Kind("a whole number above 0, or a list of 0 and 1 with an item for each layer", _is_frequency))


def window() -> Any:
    """A field for two whole numbers."""

    def accepts(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_whole, value))

    return of(Kind("two whole numbers", accepts))


def anything() -> Any:
    """A field for whatever the source has."""
    return of(Kind("anything", lambda value: True))
