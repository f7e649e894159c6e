"""Lists the content of each file: bytes by kind and tensor, from metadata alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mcore_ckpt_ext.planning.plan import ITEM_SIZE

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.view import CheckpointView


class StoredPart(NamedTuple):
    """Bytes of an array in a file; `tensor` is its name in the format."""

    file: str
    kind: str
    tensor: str
    nbytes: int


def parts_by_name(checkpoint: CheckpointView, kinds: Sequence[str] | None = None) -> Iterator[StoredPart]:
    """Yield every slice of every tensor, of all kinds or of `kinds`."""
    for kind in checkpoint.kinds() if kinds is None else kinds:
        for name in checkpoint.names(kind):
            for stored in checkpoint.stored(kind, name):
                yield StoredPart(stored.extent.file, kind, name, stored.slice.numel * ITEM_SIZE[stored.extent.dtype])
