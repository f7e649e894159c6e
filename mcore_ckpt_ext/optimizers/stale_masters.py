"""Stored masters that no step updates: those of fp32 weights in Transformer Engine's FusedAdam."""

from __future__ import annotations

from dataclasses import replace

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.buckets import BucketKey
from mcore_ckpt_ext.layout.master_check import has_fused_masters
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, STALE_MASTER
from mcore_ckpt_ext.optimizers.flat_arrays import FlatState

WHY_STALE = "the optimizer steps fp32 weights themselves, and never updates this copy"
_BUFFER_OF_FP32_WEIGHTS = "(torch.float32, "


def are_stale(arguments: JobArguments, weight_dtype: str | None) -> bool:
    """Return whether no step of a job updates the masters of some weights (see `has_fused_masters`).

    `weight_dtype`: the dtype of these weights; None if it is unknown, and then it is the job's.
    """
    if not has_fused_masters(arguments):
        return False
    return not (arguments.bf16 or arguments.fp16) if weight_dtype is None else weight_dtype == "float32"


def are_stale_in_buffer(arguments: JobArguments, dtypes: str) -> bool:
    """Return whether no step of a job updates the masters in a gradient buffer.

    `dtypes`: those of its weights and gradients, as in its keys.
    """
    return are_stale(arguments, "float32" if dtypes.startswith(_BUFFER_OF_FP32_WEIGHTS) else "")


def with_stale_masters(state: FlatState, arguments: JobArguments) -> FlatState:
    """Return the arrays of a job with the masters that it does not update as such."""

    def kind_of(key: BucketKey, kind: str) -> str:
        return STALE_MASTER if kind == FP32_PARAM and are_stale_in_buffer(arguments, key.dtypes) else kind

    relabeled = {
        group: {(key, kind_of(key, kind)): array for (key, kind), array in arrays.items()}
        for group, arrays in state.arrays.items()
    }
    return replace(state, arrays=relabeled)
