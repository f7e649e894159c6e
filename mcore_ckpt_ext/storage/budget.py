"""Limits the work and memory of reading an untrusted file, in proportion to the bytes that were read.

A few hundred bytes can describe what no machine holds: a pickle that refers to one tuple again and again, a shape with
2**62 rows, one tensor under a thousand names. Whoever makes more of a file than lies in it spends from its budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from mcore_ckpt_ext.errors import UnreadableCheckpointError, format_value, shorten

# A step is one element made, visited or hashed, or one byte copied. Intact checkpoints take a few for each byte read.
_STEPS_A_BYTE = 64
_SPARE = 1 << 18
_MOST_ALIKE = 1 << 8
MOST_AXES = 64
"""Of an array: as many as torch's own tensors can have where they are iterated over (ATen/TensorIterator.h)."""
MOST_ELEMENTS = 1 << 56
"""Of an array: more than any machine holds, and few enough that a count of bytes fits 64 bits."""


class OverBudgetError(UnreadableCheckpointError):
    """A file asks for far more work or memory than its size explains: it is damaged, or an attack."""


class Budget:
    """The steps that may be spent on what was read from one place."""

    def __init__(self, nbytes: int, where: str) -> None:
        """Open a budget for `nbytes` that were read from `where`."""
        self._nbytes, self._where = nbytes, where
        self._left = self._granted = nbytes * _STEPS_A_BYTE + _SPARE

    def spend(self, steps: int, purpose: str) -> None:
        """Spend steps before they are taken.

        Raises:
            OverBudgetError: there are not so many left.
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
    """Check keys before a dict is made of them, which compares each key with all others of the same hash.

    Nobody can foresee the hash of a text, but of numbers, and of tuples of them, many with one hash are easy to find.

    Raises:
        ValueError: they were made to have the same.
    """
    if len(set(map(hash, keys))) == len(keys):
        return
    most = max(Counter(map(hash, keys)).values())
    if most > _MOST_ALIKE:
        raise ValueError(f"{most:,} keys that have one hash")


def whole_number(value: object, what: str) -> int:
    """A number of a file's description, which has to be an integer that can be a size, a place or a count.

    `0.0`, `True` and `"0"` are none, though Python calculates with them, or nearly so.

    Raises:
        ValueError: it is no integer from 0 up to `MOST_ELEMENTS`.
    """
    if type(value) is not int or not 0 <= value <= MOST_ELEMENTS:
        raise ValueError(f"{what} that is {format_value(value)}, which is no valid size, place or count")
    return value


def elements_of(shape: tuple[object, ...]) -> int:
    """The number of elements of an array that a file describes.

    Raises:
        ValueError: no array has such a shape.
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
