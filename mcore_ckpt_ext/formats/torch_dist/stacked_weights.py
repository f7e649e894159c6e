"""The weights of a sharded checkpoint: stacked layers and experts as one tensor for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from typing_extensions import override

from mcore_ckpt_ext.formats.grid import Offsets, full_grid
from mcore_ckpt_ext.model_space.names import ShardedKey, name_at, stacked_axes
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.plan import StoredOnce, StoredSlice
from mcore_ckpt_ext.storage.budget import Budget
from mcore_ckpt_ext.storage.index_entries import StoredArray, StoredChunk

_CHUNK_BYTES = 300


class StackedWeights(StoredOnce):
    """The model's arrays in model space: layer and expert axes become part of the name."""

    def __init__(self, arrays: Mapping[str, StoredArray]) -> None:
        self._arrays = arrays
        self._places: dict[str, ShardedKey] = {}
        # Shapes may be forged, but each chunk takes some hundred bytes of the index, which limits the work.
        budget = Budget(_CHUNK_BYTES * sum(len(array.chunks) for array in arrays.values()), "the checkpoint's index")
        for key, array in arrays.items():
            stacked = stacked_axes(key)
            budget.spend(prod(array.shape[:stacked]), f"the layers and experts of {key}")
            for index in product(*(range(size) for size in array.shape[:stacked])):
                self._places[name_at(key, index)] = (key, index)
        self._grids: dict[str, Offsets | None] = {}
        self._by_index: dict[str, dict[tuple[int, ...], list[tuple[StoredChunk, int]]]] = {}

    def names(self) -> list[str]:
        """Return all names."""
        return list(self._places)

    def places(self) -> Mapping[str, ShardedKey]:
        """Return the array of each name, and its index on the stacked axes."""
        return self._places

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name, shape and dtype of a weight; None if the checkpoint does not contain it."""
        if kind != WEIGHT or name not in self._places:
            return None
        key, index = self._places[name]
        return LogicalTensor(name, self._arrays[key].shape[len(index) :], self._arrays[key].dtype)

    @override
    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        key, index = self._places[name]
        stacked = len(index)
        return [
            StoredSlice(
                Slice.whole((Region(name, chunk.offsets[stacked:], chunk.sizes[stacked:]),)), chunk.extent, first
            )
            for chunk, first in self._chunks(key).get(index, [])
        ]

    def grid(self, name: str) -> Offsets | None:
        """Return the `full_grid` of a tensor's stored parts: its array's, without the stacked axes."""
        key, index = self._places[name]
        if key not in self._grids:
            array = self._arrays[key]
            bounds = [array.bounds_on(axis) for axis in range(len(array.shape))]
            self._grids[key] = full_grid(array.shape, bounds)
        grid = self._grids[key]
        return None if grid is None else grid[len(index) :]

    def _chunks(self, key: str) -> dict[tuple[int, ...], list[tuple[StoredChunk, int]]]:
        """Return an array's chunks by stack index, with the position of the index's first element in each."""
        if key not in self._by_index:
            stacked = stacked_axes(key)
            by_index: dict[tuple[int, ...], list[tuple[StoredChunk, int]]] = {}
            ones = (1,) * stacked
            for chunk in self._arrays[key].chunks:
                if chunk.sizes[:stacked] == ones:  # the usual case in large checkpoints
                    by_index.setdefault(chunk.offsets[:stacked], []).append((chunk, 0))
                    continue
                inner = prod(chunk.sizes[stacked:])
                for number, offsets in enumerate(product(*(range(size) for size in chunk.sizes[:stacked]))):
                    index = tuple(a + b for a, b in zip(chunk.offsets, offsets, strict=False))
                    by_index.setdefault(index, []).append((chunk, number * inner))
            self._by_index[key] = by_index
        return self._by_index[key]
