"""The parts of an array, or of an object, in the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StoredParts(NamedTuple):
    """An array or object, by its kind and its name in the format.

    Attributes:
        kind: its kind.
        tensor: its name.
        places: the file and the bytes of each part; at least one, in an iterable that is used once.
    """

    kind: str
    tensor: str
    places: Iterable[tuple[str, int]]
