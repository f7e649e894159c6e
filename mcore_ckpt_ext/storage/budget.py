"""Limits the work and memory of reading an untrusted file, in proportion to the bytes that were read.

A few hundred bytes can describe more than fits any machine: a pickle that refers to one tuple many times, a shape with
2**62 rows, one tensor under a thousand names. Code that expands a file spends steps from its budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from mcore_ckpt_ext.errors import UnreadableCheckpointError, format_value, shorten

# A step is one element created, visited or hashed, or one byte copied. Intact checkpoints need a few steps per byte.
_STEPS_A_BYTE = 64
_SPARE = 1 << 18
_MOST_ALIKE = 1 << 8
MOST_AXES = 64
"""Upper limit for the axes of an array: that of tensors that torch iterates over (ATen/TensorIterator.h)."""
MOST_ELEMENTS = 1 << 56
"""Upper limit for the elements of an array: more than fits any machine, while its bytes can be counted in 64 bits."""


class OverBudgetError(UnreadableCheckpointError):
    """A file needs far more work or memory than its size justifies: it is damaged, or an attack."""


class Budget:
    """The number of steps that may be spent on the bytes of one file."""

    def __init__(self, nbytes: int, where: str) -> None:
        """Create a budget for `nbytes` bytes that were read from `where`."""
        self._nbytes = nbytes
        self._where = where
        self._left = self._granted = nbytes * _STEPS_A_BYTE + _SPARE

    def spend(self, steps: int, purpose: str) -> None:
        """Spend steps before the work is done.

        Raises:
            OverBudgetError: fewer steps are left.
        """
        self._left -= steps
        if self._left < 0:
            raise OverBudgetError(
                "a file of the checkpoint requires far more work than its size allows; it was not used",
                found=f"more than {self._granted:,} steps for {shorten(purpose)}",
                expected=f"at most {self._granted:,} for the {self._nbytes:,} bytes that were read",
                where=self._where,
                hint="do not use this file: it is damaged, or an attack; use another iteration, or another copy",
            )


def check_keys(keys: Collection[object]) -> None:
    """Check keys for equal hashes before a dict is built, which compares all keys with one hash.

    Hashes of strings are randomized, but many numbers, and tuples of numbers, with one hash are easy to find.

    Raises:
        ValueError: far too many keys have the same hash.
    """
    if len(set(map(hash, keys))) == len(keys):
        return
    most = max(Counter(map(hash, keys)).values())
    if most > _MOST_ALIKE:
        raise ValueError(f"{most:,} keys that have one hash")


def whole_number(value: object, what: str) -> int:
    """Check that a number in a file is a valid size, position or count, and return it.

    `0.0`, `True` and `"0"` are refused.

    Raises:
        ValueError: the value is not an integer from 0 to `MOST_ELEMENTS`.
    """
    if type(value) is not int or not 0 <= value <= MOST_ELEMENTS:
        raise ValueError(f"{what} that is {format_value(value)}, which is no valid size, place or count")
    return value


def checked_numel(shape: tuple[object, ...]) -> int:
    """Return the number of elements of an array whose shape comes from a file.

    Raises:
        ValueError: no array can have this shape.
    """
    if len(shape) > MOST_AXES:
        raise ValueError(f"an array of {len(shape):,} axes")
    product = 1
    for size in shape:
        if type(size) is not int or not 0 <= size < MOST_ELEMENTS:
            raise ValueError("an array with an axis of an invalid size")
        product *= size
    if product >= MOST_ELEMENTS:
        raise ValueError(f"an array of more than {MOST_ELEMENTS:,} elements")
    return product
