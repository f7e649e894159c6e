"""Lists the content of each file: bytes by kind and tensor, from metadata alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mcore_ckpt_ext.planning.plan import ITEM_SIZE

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.view import CheckpointView


class StoredPart(NamedTuple):
    """`nbytes` of an array in a file; `tensor` is named as the file's own format names it."""

    file: str
    kind: str
    tensor: str
    nbytes: int


def parts_by_name(checkpoint: CheckpointView, kinds: Sequence[str] | None = None) -> Iterator[StoredPart]:
    """Every slice of every tensor; of some `kinds` only."""
    for kind in checkpoint.kinds() if kinds is None else kinds:
        for name in checkpoint.names(kind):
            for stored in checkpoint.stored(kind, name):
                yield StoredPart(stored.extent.file, kind, name, stored.slice.numel * ITEM_SIZE[stored.extent.dtype])
