"""Optimizer formats `dp_reshardable` and `fully_sharded_bucket_space`: an array per bucket and kind.

Sources in megatron/core/optimizer/distrib_optimizer.py: `sharded_param_state_dp_reshardable` (core_v0.15.0 to 0.19.2)
and `sharded_param_state_fs_bucket_space` (core_v0.6.0 to 0.14.0). Each rank writes a chunk for each of its parameter
pieces, and for the gaps between them. The older format also stores the padding at bucket ends; the size without it is
in an object of each group, `per_bucket_numel_unpadded`. In the newer one it is the size of the array.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from operator import add
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.job.releases import LOADS_BUCKET_SPACE, LOADS_DP_RESHARDABLE, STORES_FULLY_RESHARDABLE
from mcore_ckpt_ext.layout.buckets import BucketKey
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.optimizers.flat_arrays import ChunkPieces, FlatArray, FlatState, GroupKey, kind_of_array
from mcore_ckpt_ext.optimizers.flat_buffers import FlatBuffers, flat_optimizer
from mcore_ckpt_ext.optimizers.optimizer_format import Encoding, Holder, StoredKeys, is_of_group
from mcore_ckpt_ext.storage.budget import whole_number
from mcore_ckpt_ext.storage.index_entries import StoredArray

DP_RESHARDABLE = "dp_reshardable"
BUCKET_SPACE = "fully_sharded_bucket_space"

BUCKET_KEY = re.compile(
    r"^(?:chained_(?P<child>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtypes>\(.*\))\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)$"
)
"""The key of the array of one bucket and kind."""
GROUP_KEY = re.compile(r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.")
"""The beginning of the keys of one data-parallel group's state: the chained optimizer and the group."""
_UNPADDED = "per_bucket_numel_unpadded/shard_0_1"


def bucket_state(keys: StoredKeys) -> FlatState:
    """Return the flat arrays of a checkpoint."""
    state: dict[GroupKey, dict[tuple[BucketKey, str], FlatArray]] = {}
    unpadded: dict[str, Any] = {}
    for name, array in keys.arrays.items():
        match = BUCKET_KEY.match(name)
        if match is None:
            continue
        if len(array.shape) != 1:
            raise UnreadableCheckpointError(
                "the optimizer's state is not flat", found=f"shape {array.shape}", expected="one axis", where=name
            )
        key = BucketKey(int(match["buffer"]), match["dtypes"], int(match["bucket"]))
        (numel,) = array.shape
        if keys.label == BUCKET_SPACE:
            prefix = name[: match.start("buffer") - len("gbuf_idx_")]
            if prefix not in unpadded:
                unpadded[prefix] = keys.read_object(prefix + _UNPADDED)
            numel = _numel(unpadded[prefix], key)
        group = (int(match["child"] or 0), int(match["group"]))
        kind = kind_of_array(match["state"], array.dtype)
        state.setdefault(group, {})[key, kind] = _flat(array, numel)
    return FlatState(state, joined=False, chunked=keys.chunks_show_parameters)


def _numel(per_buffer: Any, key: BucketKey) -> int:
    """Return a bucket's size without end padding.

    `per_buffer` is a list over buffers of {dtypes: [elements of each bucket]}.
    """
    sizes = {str(dtypes): numels for dtypes, numels in per_buffer[key.buffer].items()}
    return whole_number(sizes[key.dtypes][key.bucket], "the size of a bucket")


def _flat(array: StoredArray, numel: int) -> FlatArray:
    starts, sizes = array.bounds_on(0)
    stops = list(map(add, starts, sizes))
    if max(stops, default=0) <= numel:
        return FlatArray(numel, array.dtype, ChunkPieces(starts, stops, array.chunks))
    pieces = ChunkPieces(starts, [min(stop, numel) for stop in stops], array.chunks)
    return FlatArray(numel, array.dtype, [piece for piece in pieces if piece.start < numel])


def optimizer_children(keys: Iterable[str]) -> int:
    """Return the number of chained optimizers that stored their state in flat buffers."""
    return len({match[1] for key in keys if (match := GROUP_KEY.match(key))})


def _claims(name: str, keys: StoredKeys) -> set[str]:
    """Return the keys of a format; both formats have the same, only the label identifies the older one."""
    if (keys.label == BUCKET_SPACE) != (name == BUCKET_SPACE):
        return set()
    prefixes = {key[: match.end()] for key in keys.arrays if BUCKET_KEY.match(key) and (match := GROUP_KEY.match(key))}
    return {
        key
        for key in keys
        if (match := GROUP_KEY.match(key))
        and key[: match.end()] in prefixes
        and (BUCKET_KEY.match(key) or is_of_group(key))
    }


def _read(
    rules: tuple[PackingRule, ...], holder: Holder, keys: StoredKeys, models: Callable[[], LocalModels]
) -> FlatBuffers:
    return flat_optimizer(holder, bucket_state(keys), rules, models())


ENCODINGS = (
    Encoding(
        name=DP_RESHARDABLE,
        stored="flat gradient buffers, one array per bucket and kind, without the padding at bucket ends",
        written_by="DistributedOptimizer since 0.15, by default",
        claims=partial(_claims, DP_RESHARDABLE),
        read=partial(_read, (PackingRule.SINCE_0_13,)),
        stock_loads=LOADS_DP_RESHARDABLE,
        labeled_by=STORES_FULLY_RESHARDABLE,
        is_copied_in_place=True,
        needs_same_buffers=True,
        note="another TP, PP, VPP or EP is refused or fails",
        shows_names=False,
    ),
    Encoding(
        name=BUCKET_SPACE,
        stored="flat gradient buffers, one array per bucket and kind, padded",
        written_by="DistributedOptimizer of 0.6 and 0.7 with --ckpt-fully-parallel-save",
        claims=partial(_claims, BUCKET_SPACE),
        read=partial(_read, (PackingRule.UNTIL_0_7, PackingRule.UNTIL_0_8, PackingRule.UNTIL_0_12)),
        # The loader supported it up to 0.12 (`load_checkpoint`, megatron/training/checkpointing.py).
        stock_loads=LOADS_BUCKET_SPACE,
        needs_same_buffers=True,
        note="left the loader in 0.13",
        shows_names=False,
    ),
)
