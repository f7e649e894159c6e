"""The values that an argument of a job can have, in words and as a test, and the one that it has by default."""

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

# Many times what there has been. Arguments that say more are damaged, and what they count is walked one by one.
MOST_LAYERS = 1 << 16
MOST_EXPERTS = 1 << 16
MOST_RANKS = 1 << 22
_MOST_ELEMENTS = 1 << 40
_MOST_SAMPLES = 1 << 62


@dataclass(frozen=True)
class Values(Generic[T, D]):
    """The values of an argument: those that a job can state, of type T, and those of a complete model, of type D."""

    kind: Kind[T]
    default: Any


@dataclass(frozen=True)
class Kind(Generic[T]):
    """The values that an argument can have, in words and as a test."""

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
        """A value of this kind; `value` if the job does not set it."""
        return Values(self, value)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; True and False are none."""
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


def _up_to(most: int) -> Kind[int]:
    return Kind(f"a whole number from 0 to {most:,}", lambda value: is_whole(value) and 0 <= value <= most)


LAYER_COUNT = _up_to(MOST_LAYERS)
COUNT = _up_to(MOST_EXPERTS)
RANK_COUNT = _up_to(MOST_RANKS)
ELEMENT_COUNT = _up_to(_MOST_ELEMENTS)
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
