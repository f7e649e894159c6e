"""The possible values of an argument, as a description and a test, and its default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")
D = TypeVar("D")


class Missing(Enum):
    """Marks a row without a value."""

    REQUIRED = "no default"


REQUIRED: Final = Missing.REQUIRED

# Far more than any job has had. Larger values are damaged, and code iterates over layers, experts and ranks.
MOST_LAYERS = 1 << 16
MOST_EXPERTS = 1 << 16
MOST_RANKS = 1 << 22
_MOST_ELEMENTS = 1 << 40
_MOST_SAMPLES = 1 << 62


@dataclass(frozen=True)
class Values(Generic[T, D]):
    """The values of an argument: of type T if a job sets it, and of type D in a complete model."""

    kind: Kind[T]
    default: Any


@dataclass(frozen=True)
class Kind(Generic[T]):
    """The possible values of an argument, as a description and a test."""

    expected: str
    accepts: Callable[[Any], bool]

    @property
    def required(self) -> Values[T, T]:
        """A value of this kind that every job must have."""
        return Values(self, REQUIRED)

    @property
    def optional(self) -> Values[T, T | None]:
        """A value of this kind; None if the job does not set it."""
        return Values(self, None)

    def default(self, value: T) -> Values[T, T]:
        """Return values of this kind, with a default for jobs that do not set the argument."""
        return Values(self, value)


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return is_whole(value) or (isinstance(value, float) and isfinite(value))


def _are_finite(value: Any) -> bool:
    return all(map(_is_finite, value)) if isinstance(value, (list, tuple)) else _is_finite(value)


def _is_frequency(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return 0 < len(value) <= MOST_LAYERS and all(isinstance(item, int) and 0 <= item <= 1 for item in value)
    return is_whole(value) and 0 < value <= MOST_LAYERS


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_whole, value))


def _up_to(most: int, least: int = 0) -> Kind[int]:
    return Kind(f"a whole number from {least} to {most:,}", lambda value: is_whole(value) and least <= value <= most)


LAYER_COUNT = _up_to(MOST_LAYERS)
COUNT = _up_to(MOST_EXPERTS)
RANK_COUNT = _up_to(MOST_RANKS)
ELEMENT_COUNT = _up_to(_MOST_ELEMENTS)
POSITIVE = _up_to(_MOST_ELEMENTS, 1)
SAMPLE_COUNT = _up_to(_MOST_SAMPLES)
SWITCH: Kind[bool] = Kind("True or False", lambda value: isinstance(value, bool))
TEXT: Kind[str] = Kind("a text", lambda value: isinstance(value, str))
NUMBER: Kind[float] = Kind("a finite number", _is_finite)
NOT_NEGATIVE: Kind[float] = Kind("a finite number, 0 or more", lambda value: _is_finite(value) and value >= 0)
ABOVE_ZERO: Kind[float] = Kind("a finite number above 0", lambda value: _is_finite(value) and value > 0)
NUMBERS: Kind[float | Sequence[float]] = Kind("a finite number, or several", _are_finite)
FREQUENCY: Kind[int | Sequence[int]] = Kind(
    "a whole number above 0, or a list of 0 and 1 with an item for each layer", _is_frequency
)
PAIR: Kind[Sequence[int]] = Kind("two whole numbers", _is_pair)
ANYTHING: Kind[object] = Kind("anything", lambda value: True)
