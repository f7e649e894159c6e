"""The optimizer format `dp_zero_gather_scatter`: one pickled object a group, whole buffers in it.

Source: `DistributedOptimizer.get_parameter_state_dp_zero` (megatron/core/optimizer/distrib_optimizer.py, core_v0.7.0
to 0.19.2); the legacy `distrib_optim.pt` is the same object in a file of its own. The pickle is read, which is small;
the tensors stay on disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.dcp_index import StoredObject, extent_of
from mcore_ckpt_ext.formats.flat_buffers import KINDS, FlatArray, FlatPiece, FlatState, GroupKey
from mcore_ckpt_ext.layout.buckets import BucketKey
from mcore_ckpt_ext.storage.safe_pickle import TensorReference

NAME = "dp_zero_gather_scatter"
LEGACY = "legacy_torch"
"""The same in files of its own; Megatron has no name for it."""

_KEY = re.compile(r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state/shard_0_1$")


def dp_zero_state(objects: Mapping[str, StoredObject], read_object: Callable[[str], Any]) -> FlatState:
    """The flat arrays of a checkpoint.

    Args:
        objects: all objects of the checkpoint by key.
        read_object: reads one of them by key; its tensors stay on disk.

    Raises:
        UnsupportedCheckpointError: the object is of a version before core_v0.7.0.
    """
    state: dict[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]] = {}
    for key, place in objects.items():
        if match := _KEY.match(key):
            state[int(match[1] or 0), int(match[2])] = buffer_arrays(read_object(key), place, key)
    return FlatState(state, joined=True, chunked=False)


def buffer_arrays(content: Any, place: StoredObject, where: str) -> dict[tuple[BucketKey, str], FlatArray]:
    """The arrays of one object: `{buffer: {(dtype, dtype): {state: tensor, "numel_unpadded": int}}}`.

    Raises:
        UnsupportedCheckpointError: its buckets are not coalesced (before core_v0.7.0).
    """
    if not isinstance(content, dict) or not content.get("buckets_coalesced"):
        raise UnsupportedCheckpointError(
            "the optimizer state is in the layout of Megatron before core_v0.7.0, with one tensor a bucket", where=where
        )
    return {
        (BucketKey(buffer, str(dtypes), 0), KINDS.get(name, name)): _array(tensor, place)
        for buffer, by_dtypes in content.items()
        if isinstance(buffer, int) and not isinstance(buffer, bool)
        for dtypes, states in by_dtypes.items()
        for name, tensor in states.items()
        if isinstance(tensor, TensorReference)
    }


def _array(tensor: TensorReference, place: StoredObject) -> FlatArray:
    extent = extent_of(tensor, place)
    (numel,) = tensor.shape
    return FlatArray(numel, extent.dtype, (FlatPiece(0, numel, extent, tensor.offset),))
