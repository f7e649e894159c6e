"""A part of the content of a file."""

from __future__ import annotations

from typing import NamedTuple


class StoredPart(NamedTuple):
    """Bytes of an array in a file; `tensor` is its name in the format."""

    file: str
    kind: str
    tensor: str
    nbytes: int
