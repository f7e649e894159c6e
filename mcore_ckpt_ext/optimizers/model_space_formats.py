"""The optimizer formats in model space: arrays under the sharded keys of their weights.

Sources in megatron/core/optimizer: `sharded_param_state_fully_reshardable` (distrib_optimizer.py, core_v0.15.0 to
0.19.2) and `sharded_param_state_fs_model_space` (core_v0.8.0 to 0.15.3); `sharded_state_dict` of
`Float16OptimizerWithFloat16Params` and `FP32Optimizer` (optimizer.py, core_v0.7.0 to 0.19.2) and of
`LayerWiseDistributedOptimizer` (layer_wise_optimizer.py, core_v0.16.0 to 0.19.2), which has the same format. A
checkpoint's label may apply to only one of its optimizers, so keys decide: masters are named `param` in
`fully_reshardable` and `fp32_param` in all others, and layer-wise optimizers have keys of a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mcore_ckpt_ext.errors import PackingError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import (
    LOADS_FSDP_DTENSOR,
    LOADS_FULLY_RESHARDABLE,
    LOADS_MODEL_SPACE,
    STORES_FULLY_RESHARDABLE,
)
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.master_check import first_mismatch, has_fused_masters
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, STALE_MASTER, WEIGHT
from mcore_ckpt_ext.optimizers.derived_masters import numbers_of_remainders
from mcore_ckpt_ext.optimizers.model_space_state import STATE_KEY, ModelSpaceState
from mcore_ckpt_ext.optimizers.natural_shapes import natural_shapes
from mcore_ckpt_ext.optimizers.optimizer_format import Encoding, Holder, StoredKeys
from mcore_ckpt_ext.optimizers.remainders import are_numbers_of_remainders
from mcore_ckpt_ext.optimizers.stale_masters import are_stale
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.workarounds.fully_reshardable_padding import repair, shifted_names
from mcore_ckpt_ext.transfer import read_slice

FULLY_RESHARDABLE = "fully_reshardable"
MODEL_SPACE = "fully_sharded_model_space"
LAYER_WISE = "layer_wise"
NOT_DISTRIBUTED = "no_distributed_optimizer"
FSDP_DTENSOR = "fsdp_dtensor"
_FULLY_RESHARDABLE_MASTER = "param"
_SAMPLE = 64


def is_layer_wise(arguments: JobArguments) -> bool:
    """Return whether a job distributes whole parameters among its data-parallel ranks.

    Since core_v0.17 the argument is `use_layer_wise_distributed_optimizer`; before, only the optimizer's name shows it
    (megatron/training/arguments.py).
    """
    named = str(arguments.raw.get("optimizer") or "")
    return bool(arguments.raw.get("use_layer_wise_distributed_optimizer")) or named.startswith("dist_")


def encoding_of(keys: StoredKeys) -> dict[str, str]:
    """Return the encoding of every array in model space by key.

    It is determined for each parameter by all its keys.
    """
    parts = {key: match for key in keys.arrays if (match := STATE_KEY.match(key))}
    gathered = {match["key"] for match in parts.values() if match["state"] == _FULLY_RESHARDABLE_MASTER}
    encodings = {}
    for key, match in parts.items():
        if keys.label == FSDP_DTENSOR:
            encodings[key] = FSDP_DTENSOR
        elif match["key"] in gathered:
            encodings[key] = FULLY_RESHARDABLE
        elif keys.label == MODEL_SPACE or key in keys.natural_shapes:
            encodings[key] = MODEL_SPACE
        else:
            encodings[key] = LAYER_WISE if match["chain"] and keys.label else NOT_DISTRIBUTED
    return encodings


def _claims(name: str) -> Callable[[StoredKeys], set[str]]:
    return lambda keys: {key for key, encoding in encoding_of(keys).items() if encoding == name}


def _read(
    holder: Holder, keys: StoredKeys, models: Callable[[], LocalModels], distributed: bool = True
) -> OptimizerState:
    return ModelSpaceState(keys, distributed)


def _read_model_space(holder: Holder, keys: StoredKeys, models: Callable[[], LocalModels]) -> OptimizerState:
    """Read a state that may be stored reshaped, after deriving shapes that the index lacks."""

    def weight_shape(name: str) -> tuple[int, ...] | None:
        weight = models().weights.get(name)
        return None if weight is None else weight.tensor.shape

    lacking = {
        name: (match["key"], array.shape)
        for name, array in keys.arrays.items()
        if name not in keys.natural_shapes and (match := STATE_KEY.match(name))
    }
    return ModelSpaceState(
        replace(keys, natural_shapes={**natural_shapes(lacking, weight_shape), **keys.natural_shapes}),
        is_stale=_is_stale_in(holder),
    )


def _is_stale_in(holder: Holder) -> Callable[[str], bool]:
    """Return a function that returns whether the stored master of a parameter is stale."""

    def is_stale(name: str) -> bool:
        if not has_fused_masters(holder.arguments):
            return False
        weight = holder.weights().logical_tensor(WEIGHT, name)
        return are_stale(holder.arguments, weight.dtype if weight else None)

    return is_stale


def _read_repaired(holder: Holder, keys: StoredKeys, models: Callable[[], LocalModels]) -> OptimizerState:
    """Read a state after undoing two errors of Megatron.

    0.15 to 0.19 write it shifted if a bucket other than the last ends with padding. They also write remainders as
    numbers (`_get_main_param_and_optimizer_states` returns int16, and the gathered buffers are fp32;
    distrib_optimizer.py, core_v0.15.0 to 0.19.2).
    """
    state = ModelSpaceState(keys, is_stale=_is_stale_in(holder))
    has_numbers = bool(holder.arguments.use_precision_aware_optimizer) and _holds_numbers(state, holder)
    if has_numbers or STALE_MASTER in state.kinds:
        if any(shifted_names(models(), order) for order in holder.orders()):
            raise PackingError(
                "this optimizer state may be shifted (Megatron 0.15 to 0.19), which only masters could show: those "
                "that are stored are remainders, or were never updated",
                where=str(holder.folder),
                hint="use an iteration saved without --dist-ckpt-optim-fully-reshardable",
            )
        return numbers_of_remainders(state) if has_numbers else state
    return repair(state, models(), holder.orders(), holder.weights(), holder.transfer)


def _holds_numbers(state: ModelSpaceState, holder: Holder) -> bool:
    """Return whether the stored "masters" are remainders.

    They are if all are whole numbers, and some differ from weights.
    """
    differ = False
    for name in state.names(FP32_PARAM):
        for stored in state.stored_slices(FP32_PARAM, name)[:1]:
            begin = stored.slice.start
            sample = Slice(stored.slice.regions, begin, min(stored.slice.stop, begin + _SAMPLE))
            masters = read_slice(state, holder.transfer, FP32_PARAM, sample)
            if not are_numbers_of_remainders(masters):
                return False
            weights = read_slice(holder.weights(), holder.transfer, WEIGHT, sample)
            differ = differ or first_mismatch(masters, weights) is not None
    return differ


ENCODINGS = (
    Encoding(
        name=LAYER_WISE,
        stored="arrays shaped like the weights, marked with the number of the chained optimizer",
        written_by="LayerWiseDistributedOptimizer since 0.16 (--optimizer dist_muon)",
        claims=_claims(LAYER_WISE),
        read=partial(_read, distributed=False),
        distributed=False,
    ),
    Encoding(
        name=NOT_DISTRIBUTED,
        stored="arrays shaped like the weights; without masters where the weights are fp32",
        written_by="the optimizers without --use-distributed-optimizer, of every version",
        claims=_claims(NOT_DISTRIBUTED),
        read=partial(_read, distributed=False),
        distributed=False,
        is_unlabeled=True,
    ),
    Encoding(
        name=MODEL_SPACE,
        stored="each rank's flat part of arrays shaped like the weights",
        written_by="DistributedOptimizer of 0.8 to 0.14, by default",
        claims=_claims(MODEL_SPACE),
        read=_read_model_space,
        stock_loads=LOADS_MODEL_SPACE,
        is_portable=True,
        # Up to 0.13 groups are matched by position; refused since commit 5ab481cb.
        note="0.8 to 0.13 load it, too, but exchange weight decay between groups when PP > 1",
        is_reshaped=True,
    ),
    Encoding(
        name=FULLY_RESHARDABLE,
        stored="arrays shaped like the weights; masters are called param",
        written_by="DistributedOptimizer since 0.15 with --dist-ckpt-optim-fully-reshardable",
        claims=_claims(FULLY_RESHARDABLE),
        read=_read_repaired,
        stock_loads=LOADS_FULLY_RESHARDABLE,
        note="0.15 to 0.19 may have written it shifted: mcore-ckpt verify PATH",
        may_be_shifted=True,
        stores_remainders_in_fp32=True,
        labeled_by=STORES_FULLY_RESHARDABLE,
        is_portable=True,
    ),
    Encoding(
        name=FSDP_DTENSOR,
        stored="arrays shaped like the weights, by the names of modules; masters in place of weights",
        written_by="Megatron-FSDP since 0.14 (--use-megatron-fsdp)",
        claims=_claims(FSDP_DTENSOR),
        read=_read,
        stock_loads=LOADS_FSDP_DTENSOR,
    ),
)
