"""The optimizer format `dp_zero_gather_scatter`: one pickled object per group, with whole buffers.

Source: `DistributedOptimizer.get_parameter_state_dp_zero` (megatron/core/optimizer/distrib_optimizer.py, core_v0.7.0
to 0.19.2); the legacy `distrib_optim.pt` is the same object in a separate file. Only the pickle, which is small, is
read, not the tensor data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.layout.buckets import BucketKey
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.master_check import has_fused_masters
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM
from mcore_ckpt_ext.optimizers.derived_masters import numbers_of_remainders
from mcore_ckpt_ext.optimizers.flat_arrays import KINDS, FlatArray, FlatPiece, FlatState, GroupKey
from mcore_ckpt_ext.optimizers.flat_buffers import flat_optimizer
from mcore_ckpt_ext.optimizers.optimizer_format import Encoding, Holder, StoredKeys, is_of_group
from mcore_ckpt_ext.optimizers.remainders import are_numbers_of_remainders
from mcore_ckpt_ext.optimizers.stale_masters import with_stale_masters
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.storage.dcp_index import extent_of
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.storage.tensor_reference import TensorReference
from mcore_ckpt_ext.transfer import Transfer, read_slice

NAME = "dp_zero_gather_scatter"
LEGACY = "legacy_torch"
"""The same format in separate files; Megatron has no name for it."""

_GROUP = r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\."
_KEY = re.compile(_GROUP + r"param_state/shard_0_1$")
# Samples of this many elements, evenly spaced, show whether masters are remainders.
_SAMPLE = 64
_SAMPLES = 64
_RULES = (PackingRule.SINCE_0_13, PackingRule.UNTIL_0_12, PackingRule.UNTIL_0_8, PackingRule.UNTIL_0_7)


def dp_zero_state(keys: StoredKeys) -> FlatState:
    """Return the flat arrays of a checkpoint.

    Raises:
        UnsupportedCheckpointError: a version before core_v0.7.0 wrote the object.
    """
    state: dict[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]] = {}
    for key, place in keys.objects.items():
        if match := _KEY.match(key):
            state[int(match[1] or 0), int(match[2])] = buffer_arrays(keys.read_object(key), place, key)
    return FlatState(state, joined=True, chunked=False)


def buffer_arrays(content: Any, place: StoredObject, where: str) -> dict[tuple[BucketKey, str], FlatArray]:
    """Return the arrays of one object by buffer, dtypes and state.

    Returns:
        `{buffer: {(dtype, dtype): {state: tensor, "numel_unpadded": int}}}`.

    Raises:
        UnsupportedCheckpointError: its buckets are not coalesced (before core_v0.7.0).
    """
    if not isinstance(content, dict) or not content.get("buckets_coalesced"):
        raise UnsupportedCheckpointError(
            "the optimizer state is as Megatron before core_v0.7.0 stored it, one tensor per bucket", where=where
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


def legacy_optimizer(holder: Holder, state: FlatState) -> OptimizerState:
    """Return the optimizer state in the `distrib_optim.pt` files of all ranks."""
    return _whole_buffers(holder, state, holder.models())


def _whole_buffers(holder: Holder, state: FlatState, models: LocalModels) -> OptimizerState:
    """Return the state in whole buffers, which are gathered in fp32, even remainders of masters.

    Source: `get_parameter_state_dp_zero`, megatron/core/optimizer/distrib_optimizer.py, core_v0.16.1 and 0.19.2.
    """
    state = with_stale_masters(state, holder.arguments)
    if not (holder.arguments.bf16 and has_fused_masters(holder.arguments) and _holds_numbers(state, holder.transfer)):
        return flat_optimizer(holder, state, _RULES, models)
    return numbers_of_remainders(flat_optimizer(holder, replace(state, has_numbers=True), _RULES, models))


def _holds_numbers(state: FlatState, transfer: Transfer) -> bool:
    """Return whether the stored "masters" are remainders: samples of the first ones are whole numbers."""
    masters = next(
        (a for arrays in state.arrays.values() for (_, kind), a in arrays.items() if kind == FP32_PARAM), None
    )
    if masters is None:
        return False
    whole = (Region.whole(FP32_PARAM, (masters.numel,)),)
    starts = range(0, masters.numel, max(masters.numel // _SAMPLES, _SAMPLE))
    samples = (Slice(whole, start, min(start + _SAMPLE, masters.numel)) for start in starts)
    return all(are_numbers_of_remainders(read_slice(masters, transfer, FP32_PARAM, sample)) for sample in samples)


def _claims(keys: StoredKeys) -> set[str]:
    prefixes = {key.partition("param_state/")[0] for key in keys.objects if _KEY.match(key)}
    return {k for k in keys.objects if (match := re.match(_GROUP, k)) and match[0] in prefixes and is_of_group(k)}


def _read(holder: Holder, keys: StoredKeys, models: Callable[[], LocalModels]) -> OptimizerState:
    return _whole_buffers(holder, dp_zero_state(keys), models())


ENCODINGS = (
    Encoding(
        name=NAME,
        stored="flat gradient buffers, whole, in one pickled object per group of ranks",
        written_by="DistributedOptimizer of 0.6 to 0.14 without --ckpt-fully-parallel-save",
        claims=_claims,
        read=_read,
        needs_same_buffers=True,
        shows_names=False,
        stores_remainders_in_fp32=True,
    ),
    Encoding(
        name=LEGACY,
        stored="flat gradient buffers, whole, in one distrib_optim.pt per rank",
        written_by="DistributedOptimizer of every version in legacy checkpoints",
        claims=lambda keys: (),
        read=_read,
        needs_same_buffers=True,
        shows_names=False,
        stores_remainders_in_fp32=True,
        is_in_rank_files=True,
    ),
)
