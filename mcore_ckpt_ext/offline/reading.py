"""A checkpoint cut into blocks of bounded size, and as sources of which each question is asked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.extents import Rearranged
from mcore_ckpt_ext.planning.plan import Derivation, Source, StoredSlice, derivation_of

BLOCK_ELEMENTS = 1 << 22


class Remembering:
    """A source that is asked each question once."""

    def __init__(self, source: Source) -> None:
        self.stored: Callable[[str, str], Sequence[StoredSlice]] = lru_cache(maxsize=None)(source.stored)
        self.logical_tensor: Callable[[str, str], LogicalTensor | None] = lru_cache(maxsize=None)(source.logical_tensor)
        self._source = source

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """How a tensor is derived; None where it is stored. What `stored` answers is then what it is made from."""
        return derivation_of(self._source, kind, name)


class AsStored:
    """A source whose numbers are read as they are stored, not less what its model space has them less."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.logical_tensor = source.logical_tensor

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """The slices of a tensor."""
        found = self._source.stored(kind, name)
        return [
            replace(one, extent=replace(one.extent, shift=0.0)) if isinstance(one.extent, Rearranged) else one
            for one in found
        ]


def blocks(regions: tuple[Region, ...], numel: int | None = None) -> Iterator[Slice]:
    """Cut the first `numel` elements of some regions, by default all, into slices of bounded size."""
    end = Slice.whole(regions).stop if numel is None else numel
    for start in range(0, end, BLOCK_ELEMENTS):
        yield Slice(regions, start, min(start + BLOCK_ELEMENTS, end))
