"""The precision in which a job keeps masters and moments, and what a resume in less precision rounds.

Checkpoints have fp32 numbers of whatever the optimizer keeps (`get_unscaled_state`), and every optimizer takes them
with a cast (`set_scaled_state`, transformer_engine/pytorch/optimizers/fused_adam.py, 2.1 to 2.20.2).
"""

from __future__ import annotations

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM

_FP32 = "float32"
_NAMES = {"fp32": _FP32, "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
_FLAGS = {name: flag for flag, name in _NAMES.items()}
# Kept with a scale, which follows from the largest number of a shard (`_apply_scale`, fused_adam.py).
_SCALED = ("float16", "uint8")
_ARGUMENTS = {FP32_PARAM: "main_params_dtype", EXP_AVG: "exp_avg_dtype", EXP_AVG_SQ: "exp_avg_sq_dtype"}
_WORDS = {FP32_PARAM: "masters", EXP_AVG: "first moments", EXP_AVG_SQ: "second moments"}


def kept_dtypes(job: JobArguments) -> dict[str, str]:
    """Return the dtypes of kinds whose precision is an argument (`--use-precision-aware-optimizer`).

    Offloaded to the host, all of them are in fp32: the classes there get no precision (`HybridDeviceOptimizer`,
    megatron/core/optimizer/__init__.py, core_v0.12.0 to 0.19.2).

    Returns:
        Only the kinds whose argument is known.
    """
    if not job.use_precision_aware_optimizer or job.optimizer_cpu_offload:
        return dict.fromkeys(_ARGUMENTS, _FP32)
    given = {kind: str(job.raw[name]).removeprefix("torch.") for kind, name in _ARGUMENTS.items() if name in job.raw}
    return {kind: _NAMES.get(dtype, dtype) for kind, dtype in given.items()}


def rounding_of(written: JobArguments, running: JobArguments, *, is_scaled_anew: bool) -> str:
    """Return in words what a resume rounds to the precision of the job; empty if nothing.

    A job in fp32 steps its weights, whatever the dtype of masters (`step`, fused_adam.py).

    Args:
        written: the arguments of the job that saved the checkpoint.
        running: the arguments of the job that resumes it.
        is_scaled_anew: whether the shards, and so their scales, may differ from those of the job that saved it.
    """
    before = kept_dtypes(written)
    steps_weights = running.bf16 is False and not running.fp16

    def stays(kind: str, dtype: str) -> bool:
        is_kept = before.get(kind) == dtype and not (is_scaled_anew and dtype in _SCALED)
        return is_kept or (kind == FP32_PARAM and steps_weights)

    rounded = [
        f"{_WORDS[kind]} to {_FLAGS.get(dtype, dtype)}"
        for kind, dtype in kept_dtypes(running).items()
        if dtype != _FP32 and not stays(kind, dtype)
    ]
    return f"rounded, because this job keeps them so: {', '.join(rounded)}" if rounded else ""
