"""Refuses optimizer state that cannot be compared with weights, or whose parameters cannot be found."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.quantized import QUANTIZED, quantizes
from mcore_ckpt_ext.layout.weight_shards import expert_weight_shards, weight_shards
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM, contradicts_kind
from mcore_ckpt_ext.optimizers.model_space_formats import FULLY_RESHARDABLE
from mcore_ckpt_ext.optimizers.optimizer_format import Holder, StoredKeys
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.index_entries import StoredArray

_QUANTIZING = ("fp8_param_gather", "fp4_param_gather")
# FusedAdam divides such moments by a scale for each tensor, and Megatron stores them multiplied by it, in fp32
# (`get_unscaled_state`, transformer_engine/pytorch/optimizers/fused_adam.py, 2.1 to 2.20.2).
_SCALED = ("float16", "uint8", "int8", "float8_e4m3fn", "float8_e5m2")
_MODEL_SPACE_MASTER = re.compile(r"^(?:chained_\d+\.)*optimizer\.state\.(?:fp32_param|param)\.")

_MOMENT = re.compile(rf"optimizer(?=\.).*\.({EXP_AVG}|{EXP_AVG_SQ})(?:\.|$)")


def check_provable(holder: Holder, keys: StoredKeys | None, encodings: Sequence[str]) -> None:
    """Refuse optimizer state that cannot be verified by comparison with weights.

    Args:
        holder: the checkpoint.
        keys: the stored state of a torch_dist checkpoint's optimizers.
        encodings: the names of the state's encodings.

    Raises:
        UnreadableCheckpointError: an array has a dtype that no optimizer keeps.
        UnsupportedCheckpointError: the state cannot be verified, or its parameters cannot be located.
    """
    _check_dtypes(holder, keys.arrays if keys else {})
    reason = _unprovable(holder, keys)
    if reason:
        raise UnsupportedCheckpointError(
            "the optimizer state cannot be verified: no stored weights are derived from its masters in a known way",
            found=reason,
            where=str(holder.folder),
            hint="resume with the layout and the optimizer options that it was written with (without them, "
            "Megatron would read other values as masters); or with --no-load-optim",
        )
    in_flat_buffers = keys is not None and any(".gbuf_idx_" in key for key in keys)
    if in_flat_buffers and not holder.arguments.is_set("tensor_model_parallel_size"):
        raise UnsupportedCheckpointError(
            "the optimizer state is stored in flat buffers, and the parallel layout that they were written "
            "under is unknown",
            found=holder.arguments.source,
            where=str(holder.folder),
            hint="pass the layout: --tensor-model-parallel-size N and so on (in a conversion, "
            "--source-tensor-model-parallel-size N); or convert the weights alone: --drop optimizer",
        )
    shards = weight_shards(holder.arguments)
    of_experts = expert_weight_shards(holder.arguments)
    if in_flat_buffers and holder.arguments.num_experts and max(shards, of_experts) > 1:
        raise UnsupportedCheckpointError(
            "the place of experts in the flat optimizer buffers of generalized tensor parallelism is unknown",
            found=f"{quantity(shards, 'shard')} of dense weights, {of_experts} of those of experts",
            where=str(holder.folder),
            hint="resume with the layout and the --tensor-parallel-num-weight-shards that it was written with, "
            "which stock Megatron supports; or with --no-load-optim",
        )
    if FULLY_RESHARDABLE not in encodings and _transposes_experts(holder.arguments):
        raise UnsupportedCheckpointError(
            "the optimizer state of the experts is transposed, and their weights are not",
            found="GroupedMLP: --moe-grouped-gemm without Transformer Engine's grouped linear layers",
            where=str(holder.folder),
            hint="resume under the layout that wrote it and save once with --dist-ckpt-optim-fully-reshardable "
            "(Megatron 0.15, 0.16); or resume with --no-load-optim",
        )


def _check_dtypes(holder: Holder, arrays: Mapping[str, StoredArray]) -> None:
    """Refuse masters and moments that are stored as integers: nothing else contradicts the dtype."""
    for key, array in arrays.items():
        moment = _MOMENT.search(key)
        kind = FP32_PARAM if is_master(key) and array.dtype != "int16" else moment[1] if moment else ""
        if contradicts_kind(kind, array.dtype):
            raise UnreadableCheckpointError(
                "an array of the optimizer's state has a dtype that no optimizer keeps: its metadata is damaged",
                found=f"{kind} of {array.dtype}",
                where=f"{key}, {holder.folder}",
                hint="use another iteration, or another copy of this one",
            )


def _unprovable(holder: Holder, keys: StoredKeys | None) -> str | None:
    arrays = keys.arrays if keys else {}
    masters = [array for key, array in arrays.items() if is_master(key)]
    if narrow := next((array for array in masters if array.dtype not in ("float32", "int16")), None):
        return f"masters of {narrow.dtype}"
    moments = [key for key, array in arrays.items() if array.dtype in _SCALED and not is_master(key)]
    if moments:
        return f"moments of {arrays[moments[0]].dtype} without their scale: {moments[0]}"
    in_buffers = any(f"(torch.{QUANTIZED}," in key for key in arrays)
    if in_buffers and not quantizes(holder.arguments):
        return f"gradient buffers for parameters of torch.{QUANTIZED}, in a job without {' or '.join(_QUANTIZING)}"
    if (in_buffers or quantizes(holder.arguments)) and any(array.dtype == "int16" for array in masters):
        return "remainders of bf16 weights as masters, in a job whose weights are fp8 or fp4"
    return None


def _transposes_experts(arguments: JobArguments) -> bool:
    """Return whether experts were `GroupedMLP`.

    `GroupedMLP` (megatron/core/transformer/moe/experts.py, core_v0.7.0 to 0.16.1) has one matrix for all experts of a
    rank, transposed; `sharded_state_dict` transposes its weights, but not the flat optimizer state. The choice is made
    in megatron/core/models/gpt/moe_module_specs.py (core_v0.11.0 to 0.16.1). The arguments of older versions do not
    record the choice; then the master check decides.
    """
    chosen = arguments.moe_use_legacy_grouped_gemm
    return bool(arguments.moe_grouped_gemm) and bool(
        chosen or (chosen is not None and arguments.transformer_impl == "local")
    )


def has_remainders(index: DcpIndex) -> bool:
    """Return whether masters are int16 remainders, as of a precision-aware optimizer with bf16 weights."""
    return any(is_master(key) and array.dtype == "int16" for key, array in index.arrays.items())


def is_master(key: str) -> bool:
    """Return whether the array of a sharded key contains masters, in any torch_dist format."""
    return key.endswith(".param") if ".gbuf_idx_" in key else bool(_MODEL_SPACE_MASTER.match(key))
