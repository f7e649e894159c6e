"""Finds failures of stock Megatron with intact optimizer state, from what is stored."""

from __future__ import annotations

from collections.abc import Callable

from mcore_ckpt_ext.errors import CheckpointError, PackingError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER, WEIGHT
from mcore_ckpt_ext.optimizers import stock_failures
from mcore_ckpt_ext.optimizers.stock_failures import StockFailure
from mcore_ckpt_ext.optimizers.table import encodings_named


def stock_failure(checkpoint: CheckpointView) -> StockFailure | None:
    """Return how stock Megatron fails with the stored state under every layout; None if it does not."""
    return next((failure for failure, applies in _FAILURES if applies(checkpoint)), None)


def _is_offloaded(checkpoint: CheckpointView) -> bool:
    """Return whether a distributed optimizer runs on the CPU, in part."""
    arguments = checkpoint.job.arguments()
    return bool(arguments.use_distributed_optimizer and arguments.optimizer_cpu_offload)


def _trains_fp32(checkpoint: CheckpointView) -> bool:
    """Return whether a distributed optimizer of fp32 parameters would be copied in place."""
    arguments = checkpoint.job.arguments()
    if not arguments.use_distributed_optimizer or not arguments.is_complete or arguments.bf16 or arguments.fp16:
        return False
    encodings = encodings_named(checkpoint.optimizer.format())
    is_by_rank = checkpoint.format.loading.by_rank and bool(encodings)
    return is_by_rank or any(encoding.is_copied_in_place for encoding in encodings)


def _is_of_torch_adam(checkpoint: CheckpointView) -> bool:
    """Return whether torch's Adam wrote the groups of a distributed optimizer.

    A job with torch's Adam fails otherwise: it asserts that there was a step ("torch's Adam" of `megatron/policy.py`).
    """
    if not checkpoint.job.arguments().use_distributed_optimizer or not checkpoint.optimizer.format():
        return False
    try:
        groups = checkpoint.optimizer.param_groups()
    except CheckpointError:  # what cannot be read says nothing about how it was written
        return False
    return any("amsgrad" in group for group in groups) and not any("bias_correction" in group for group in groups)


def _stores_remainders_as_masters(checkpoint: CheckpointView) -> bool:
    """Return whether `fully_reshardable` stores remainders of masters in fp32 (`numbers_of_remainders`)."""
    encodings = encodings_named(checkpoint.optimizer.format())
    if not any(encoding.stores_remainders_in_fp32 for encoding in encodings):
        return False
    try:
        return PARAM_REMAINDER in checkpoint.optimizer.state().kinds
    except CheckpointError:  # what cannot be read says nothing about how it was written
        return False


def _is_shifted(checkpoint: CheckpointView) -> bool:
    """Return whether Megatron wrote masters shifted, or may have done so where it cannot be seen."""
    encodings = encodings_named(checkpoint.optimizer.format())
    if not any(encoding.may_be_shifted for encoding in encodings) or not checkpoint.names(WEIGHT):
        return False
    try:
        return bool(checkpoint.optimizer.state().shifted)
    except PackingError:
        return True
    except CheckpointError:  # what cannot be read says nothing about how it was written
        return False


_FAILURES: tuple[tuple[StockFailure, Callable[[CheckpointView], bool]], ...] = (
    (stock_failures.CPU_OFFLOADING, _is_offloaded),
    (stock_failures.FP32_IN_PLACE, _trains_fp32),
    (stock_failures.SETTINGS_OF_FUSED_ADAM, _is_of_torch_adam),
    (stock_failures.SHIFTED_PARAMETERS, _is_shifted),
    (stock_failures.REMAINDERS_AS_FP32, _stores_remainders_as_masters),
)
