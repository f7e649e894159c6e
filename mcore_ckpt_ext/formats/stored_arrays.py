"""The arrays of an index as they are stored: by sharded key, with stacked axes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from typing_extensions import override

from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.plan import StoredOnce, StoredSlice
from mcore_ckpt_ext.storage.index_entries import StoredArray, StoredChunk


class StoredArrays(StoredOnce):
    """A source for reads by Megatron's sharded keys; it ignores the kind."""

    def __init__(self, arrays: Mapping[str, StoredArray]) -> None:
        self._arrays = arrays
        self._chunks: dict[str, _Chunks] = {}

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the shape and dtype of the array; None if the checkpoint has no array of that key."""
        array = self._arrays.get(name)
        return None if array is None else LogicalTensor(name, array.shape, array.dtype)

    @override
    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return [_slice(name, chunk) for chunk in self._arrays[name].chunks]

    def stored_slices_in(self, kind: str, region: Region) -> Sequence[StoredSlice]:
        """Return the chunks that overlap a region."""
        chunks = self._chunks.get(region.name)
        if chunks is None:
            chunks = self._chunks[region.name] = _Chunks(self._arrays[region.name].chunks)
        return [_slice(region.name, chunk) for chunk in chunks.chunks_of(region)]


class _Chunks:
    """The chunks of an array, sorted by their offset on the first axis."""

    def __init__(self, chunks: Sequence[StoredChunk]) -> None:
        self._by_place = {(chunk.offsets, chunk.sizes): chunk for chunk in chunks}
        self._sorted = sorted(chunks, key=lambda chunk: chunk.offsets)
        self._begins = [chunk.offsets[:1] for chunk in self._sorted]
        self._longest = max((chunk.sizes[0] for chunk in chunks if chunk.sizes), default=0)

    def chunks_of(self, region: Region) -> Sequence[StoredChunk]:
        if same := self._by_place.get((region.offsets, region.sizes)):
            return [same]
        if not region.sizes:
            return self._sorted
        begin = region.offsets[0]
        size = region.sizes[0]
        first = bisect_left(self._begins, (begin - self._longest + 1,))
        last = bisect_right(self._begins, (begin + size - 1,))
        return [chunk for chunk in self._sorted[first:last] if _touch(chunk, region)]


def _touch(chunk: StoredChunk, region: Region) -> bool:
    axes = zip(chunk.offsets, chunk.sizes, region.offsets, region.sizes, strict=True)
    return all(a < b + size and b < a + length for a, length, b, size in axes)


def _slice(name: str, chunk: StoredChunk) -> StoredSlice:
    return StoredSlice(Slice.whole((Region(name, chunk.offsets, chunk.sizes),)), chunk.extent, 0)
