"""The optimizer formats `dp_reshardable` and `fully_sharded_bucket_space`: one array a bucket and kind.

Sources in megatron/core/optimizer/distrib_optimizer.py: `sharded_param_state_dp_reshardable` (core_v0.15.0 to 0.19.2)
and `sharded_param_state_fs_bucket_space` (core_v0.6.0 to 0.14.0). Each rank writes a chunk for each of its parameter
pieces, and for what lies between them. The older format stores the padding at bucket ends, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from mcore_ckpt_ext.formats.dcp_index import DcpIndex, StoredArray
from mcore_ckpt_ext.formats.flat_buffers import KINDS, FlatArray, FlatPiece, FlatState, GroupKey
from mcore_ckpt_ext.layout.buckets import BucketKey

DP_RESHARDABLE = "dp_reshardable"
BUCKET_SPACE = "fully_sharded_bucket_space"

_KEY = re.compile(
    r"^(?:chained_(?P<child>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtypes>\(.*\))\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)$"
)
_GROUP = re.compile(r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.")
_UNPADDED = "per_bucket_numel_unpadded/shard_0_1"


def bucket_state(index: DcpIndex, read_object: Callable[[str], Any]) -> FlatState:
    """The flat arrays of a checkpoint.

    Args:
        index: the arrays of the checkpoint.
        read_object: reads a pickled object of the checkpoint by key.
    """
    state: dict[GroupKey, dict[tuple[BucketKey, str], FlatArray]] = {}
    unpadded: dict[str, Any] = {}
    for name, array in index.arrays.items():
        match = _KEY.match(name)
        if match is None:
            continue
        prefix = name[: match.start("buffer") - len("gbuf_idx_")]
        if prefix not in unpadded:
            unpadded[prefix] = read_object(prefix + _UNPADDED)
        key = BucketKey(int(match["buffer"]), match["dtypes"], int(match["bucket"]))
        numel = _numel(unpadded[prefix], key)
        group = (int(match["child"] or 0), int(match["group"]))
        kind = KINDS.get(match["state"], match["state"])
        state.setdefault(group, {})[key, kind] = _flat(array, numel)
    return FlatState(state, joined=False, chunked=index.chunks_show_parameters)


def _numel(per_buffer: Any, key: BucketKey) -> int:
    """Elements of a bucket without its end padding: a list over buffers of {dtypes: [elements of each bucket]}."""
    sizes = {str(dtypes): numels for dtypes, numels in per_buffer[key.buffer].items()}
    return int(sizes[key.dtypes][key.bucket])


def _flat(array: StoredArray, numel: int) -> FlatArray:
    pieces = tuple(
        FlatPiece(chunk.offsets[0], min(chunk.offsets[0] + chunk.sizes[0], numel), chunk.extent, 0)
        for chunk in array.chunks
        if chunk.offsets[0] < numel
    )
    return FlatArray(numel, array.dtype, pieces)


def optimizer_children(keys: Iterable[str]) -> int:
    """How many chained optimizers stored their state in flat buffers."""
    return len({match[1] for key in keys if (match := _GROUP.match(key))})
