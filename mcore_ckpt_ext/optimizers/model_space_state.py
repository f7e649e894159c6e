"""Optimizer state in arrays with the shapes of the weights, whose keys identify the parameters.

`fully_sharded_model_space` stores each rank's flat part of its shard in an array of shape [shards along each axis,
elements of a shard], whose natural shape is in the metadata (dist_checkpointing/strategies/resharding.py,
`apply_nd_flattened_tensors_reformulation`, core_v0.8.0 to 0.15.3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product

from typing_extensions import override

from mcore_ckpt_ext.model_space.names import name_at, stacked_axes
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, STALE_MASTER, LogicalTensor
from mcore_ckpt_ext.optimizers.flat_arrays import kind_of_array
from mcore_ckpt_ext.optimizers.optimizer_format import CHAIN, StoredKeys
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import StoredSlice
from mcore_ckpt_ext.storage.index_entries import StoredArray

STATE_KEY = re.compile(CHAIN + r"optimizer\.state\.(?P<state>\w+?)\.(?P<key>.+)$")


class ModelSpaceState(OptimizerState):
    """Optimizer state that does not depend on a packing."""

    def __init__(
        self, keys: StoredKeys, distributed: bool = True, is_stale: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Read the keys.

        Args:
            keys: the stored state.
            distributed: whether a DistributedOptimizer stored it.
            is_stale: returns whether no step updated the master of a parameter.
        """
        self._distributed = distributed
        self._slices: dict[tuple[str, str], list[StoredSlice]] = {}
        self._tensors: dict[tuple[str, str], LogicalTensor] = {}
        for name, array in keys.arrays.items():
            if match := STATE_KEY.match(name):
                kind = kind_of_array(match["state"], array.dtype)
                self._add(kind, match["key"], array, keys.natural_shapes.get(name), is_stale)
        self.kinds = tuple(dict.fromkeys(kind for kind, _ in self._tensors))

    @override
    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        return self._tensors.get((kind, name))

    @override
    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return self._slices.get((kind, name), [])

    @override
    def names(self, kind: str | None = None) -> list[str]:
        return list(dict.fromkeys(name for of_kind, name in self._tensors if kind in (None, of_kind)))

    @override
    def is_distributed(self, name: str) -> bool:
        return self._distributed

    def _add(
        self,
        kind: str,
        key: str,
        array: StoredArray,
        natural: tuple[int, ...] | None,
        is_stale: Callable[[str], bool],
    ) -> None:
        shape = natural or array.shape
        stacked = stacked_axes(key)
        if kind == FP32_PARAM and is_stale(name_at(key, (0,) * stacked)):
            kind = STALE_MASTER
        for stack in product(*(range(size) for size in shape[:stacked])):
            name = name_at(key, stack)
            self._tensors[kind, name] = LogicalTensor(name, shape[stacked:], array.dtype)
        for chunk in array.chunks:
            if natural is None:
                offsets = chunk.offsets
                sizes = chunk.sizes
                start = 0
            else:
                # Axis i of the stored array is the shard along axis i of the natural one; the last axis is elements.
                sizes = tuple(size // shards for size, shards in zip(natural, array.shape[:-1], strict=True))
                offsets = tuple(index * size for index, size in zip(chunk.offsets[:-1], sizes, strict=True))
                start = chunk.offsets[-1]
            # A chunk of several layers or experts contains one after the other.
            spans = [range(first, first + size) for first, size in zip(offsets, sizes[:stacked], strict=False)]
            regions = tuple(
                Region(name_at(key, stack), offsets[stacked:], sizes[stacked:]) for stack in product(*spans)
            )
            stored = StoredSlice(Slice(regions, start, start + chunk.extent.numel), chunk.extent, 0)
            for region in regions:
                self._slices.setdefault((kind, region.name), []).append(stored)
