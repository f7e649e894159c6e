"""The optimizer formats `fully_reshardable` and `fully_sharded_model_space`: arrays shaped like the weights.

Sources in megatron/core/optimizer/distrib_optimizer.py: `sharded_param_state_fully_reshardable` (core_v0.15.0 to
0.19.2) and `sharded_param_state_fs_model_space` (core_v0.8.0 to 0.15.3). The older one stores each rank's flat part of
its shard, in an array of shape [shards along each axis, elements of a shard] whose natural shape stands in the
metadata (dist_checkpointing/strategies/resharding.py, `apply_nd_flattened_tensors_reformulation`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

from mcore_ckpt_ext.formats.dcp_index import DcpIndex, StoredArray
from mcore_ckpt_ext.formats.flat_buffers import KINDS
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor, name_at, stacked_axes
from mcore_ckpt_ext.planning.plan import StoredSlice

FULLY_RESHARDABLE = "fully_reshardable"
MODEL_SPACE = "fully_sharded_model_space"

_KEY = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?P<state>\w+?)\.(?P<key>.+)$")


class ModelSpaceState:
    """Optimizer state that needs no layout: every array says which elements of which tensor it holds."""

    def __init__(self, index: DcpIndex) -> None:
        self._slices: dict[tuple[str, str], list[StoredSlice]] = {}
        self._tensors: dict[tuple[str, str], LogicalTensor] = {}
        for name, array in index.arrays.items():
            if match := _KEY.match(name):
                kind = KINDS.get(match["state"], match["state"])
                self._add(kind, match["key"], array, index.natural_shapes.get(name))
        self.kinds = tuple(dict.fromkeys(kind for kind, _ in self._tensors))

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """See `planning.plan.Source`."""
        return self._tensors.get((kind, name))

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """See `planning.plan.Source`."""
        return self._slices.get((kind, name), [])

    def lost_elements(self) -> dict[str, int]:
        """See `formats.optimizer_encodings.OptimizerState`."""
        return {}

    def names(self) -> list[str]:
        """All parameters with optimizer state."""
        return list(dict.fromkeys(name for _, name in self._tensors))

    def witnesses(self) -> list[str]:
        """Where the layout is known from."""
        return ["the arrays' own names"]

    def _add(self, kind: str, key: str, array: StoredArray, natural: tuple[int, ...] | None) -> None:
        shape = natural or array.shape
        stacked = stacked_axes(key)
        for stack in product(*(range(size) for size in shape[:stacked])):
            name = name_at(key, stack)
            self._tensors[kind, name] = LogicalTensor(name, shape[stacked:], array.dtype)
        for chunk in array.chunks:
            if natural is None:
                offsets, sizes, start = chunk.offsets, chunk.sizes, 0
            else:
                # Axis i of the stored array counts shards along axis i of the natural one; the last counts elements.
                sizes = tuple(size // shards for size, shards in zip(natural, array.shape[:-1], strict=True))
                offsets = tuple(index * size for index, size in zip(chunk.offsets[:-1], sizes, strict=True))
                start = chunk.offsets[-1]
            # A chunk of several layers or experts holds one after the other.
            spans = [range(first, first + size) for first, size in zip(offsets, sizes[:stacked], strict=False)]
            regions = tuple(
                Region(name_at(key, stack), offsets[stacked:], sizes[stacked:]) for stack in product(*spans)
            )
            stored = StoredSlice(Slice(regions, start, start + chunk.extent.numel), chunk.extent, 0)
            for region in regions:
                self._slices.setdefault((kind, region.name), []).append(stored)

