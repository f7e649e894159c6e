"""Which kind of optimizer a live job has, and what stock Megatron makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.online.homes.distributed import DistributedHome
from mcore_ckpt_ext.online.homes.home import Home
from mcore_ckpt_ext.online.homes.offloaded import OffloadedHome
from mcore_ckpt_ext.online.homes.precision_aware import PrecisionAwareHome
from mcore_ckpt_ext.online.homes.undistributed import UndistributedHome

# megatron/core/optimizer/optimizer.py, core_v0.7.0 to 0.19.2.
_UNDISTRIBUTED = ("Float16OptimizerWithFloat16Params", "FP32Optimizer")


def homes_of(optimizer: Any) -> list[Home]:
    """The homes of a (chained) optimizer's masters and moments.

    Raises:
        UnsupportedCheckpointError: some child is of a kind that is not filled.
    """
    children = distributed_optimizers(optimizer)
    if children is not None:
        check_supported(children)
        return [_home_of(child) for child in children]
    whole = undistributed_optimizers(optimizer)
    if whole is None:
        raise UnsupportedCheckpointError(
            "this version does not fill this kind of optimizer",
            found=type(optimizer).__name__,
            helps="resume as the checkpoint was written, which is left to Megatron; or with --no-load-optim",
        )
    return [UndistributedHome(child) for child in whole]


def _home_of(optimizer: Any) -> Home:
    if is_offloaded(optimizer):
        return OffloadedHome(optimizer)
    return PrecisionAwareHome(optimizer) if is_precision_aware(optimizer) else DistributedHome(optimizer)


def distributed_optimizers(optimizer: Any) -> list[Any] | None:
    """The DistributedOptimizers of a (chained) optimizer, stubs left out; None when some child is another kind."""
    children = getattr(optimizer, "chained_optimizers", [optimizer])
    real = [child for child in children if not getattr(child, "is_stub_optimizer", False)]
    return real if all(hasattr(child, "gbuf_ranges") for child in real) else None


def undistributed_optimizers(optimizer: Any) -> list[Any] | None:
    """The optimizers of whole parameters under Adam, stubs left out; None when some child is another kind.

    Not of LayerWiseDistributedOptimizer, whose children step other parameters on every rank.
    """
    children = getattr(optimizer, "chained_optimizers", [optimizer])
    if {type(one).__name__ for one in (optimizer, *children)} - {"ChainedOptimizer", *_UNDISTRIBUTED}:
        return None
    real = [child for child in children if not getattr(child, "is_stub_optimizer", False)]
    groups = (group for child in real for group in child.optimizer.param_groups)
    return real if all("eps" in group for group in groups) else None


def check_supported(optimizers: Sequence[Any]) -> None:
    """Refuse masters beside fp8 or fp4 primary weights that are not plain fp32 shards.

    Raises:
        UnsupportedCheckpointError: the fused optimizer keeps them, or part of them is on the CPU.
    """
    for optimizer in optimizers:
        # Transformer Engine's quantised tensors show a high-precision dtype; their buffers do not.
        if not any(dtypes[0] == torch.uint8 for ranges in optimizer.gbuf_ranges for dtypes in ranges):
            continue
        config = optimizer.config
        inside = getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", is_precision_aware(optimizer))
        if inside or is_offloaded(optimizer):
            raise UnsupportedCheckpointError(
                "this version does not fill this kind of optimizer from a checkpoint of another kind or layout",
                found="fp8 or fp4 primary weights whose masters are in the fused optimizer, or on the CPU",
                expected="plain fp32 masters",
                helps="resume under the layout that the checkpoint was written with; without "
                "--use-precision-aware-optimizer and --optimizer-cpu-offload; or with --no-load-optim",
            )


def is_precision_aware(optimizer: Any) -> bool:
    """Whether a DistributedOptimizer leaves its masters to Transformer Engine's FusedAdam, or to the CPU's."""
    return bool(getattr(optimizer.config, "use_precision_aware_optimizer", False))


def is_offloaded(optimizer: Any) -> bool:
    """Whether a DistributedOptimizer works on the CPU in part (HybridDeviceOptimizer)."""
    return hasattr(optimizer.optimizer, "sub_optimizers")


def keeps_remainders(optimizer: Any) -> bool:
    """Whether the trailing 16 bits of the masters, as int16, are all that is kept beside bf16 weights.

    Source: `FusedAdam.store_param_remainders`, transformer_engine/pytorch/optimizers/fused_adam.py, 2.1 to 2.20.2;
    Megatron sets it since core_v0.11.0, where the class can do it, and has no flag for it.
    """
    inner = optimizer.optimizer
    return bool(getattr(inner, "store_param_remainders", False) and getattr(optimizer.config, "bf16", False))


def switched(optimizer: Any, written: JobArguments, stored_remainders: Callable[[], bool]) -> list[str]:
    """What a job switched on or off of its optimizer since the checkpoint; Megatron looks at none of it.

    torch's loader copies numbers into whatever tensor is asked for: int16 remainders into fp32 masters, or masters
    into remainders (seen with core_v0.19.0 and 0.19.2; NaN after the next step).

    Args:
        optimizer: the live (chained) optimizer.
        written: the arguments of the job that wrote the checkpoint.
        stored_remainders: whether the checkpoint has remainders; asked only where both jobs may have them.
    """
    optimizers = distributed_optimizers(optimizer) or []
    found = []
    if bool(written.use_distributed_optimizer) != (distributed_optimizers(optimizer) is not None):
        found.append("use_distributed_optimizer")
    if bool(written.optimizer_cpu_offload) != any(map(is_offloaded, optimizers)):
        found.append("optimizer_cpu_offload")
    aware = any(map(is_precision_aware, optimizers))
    if bool(written.use_precision_aware_optimizer) != aware:
        found.append("use_precision_aware_optimizer")
    elif aware and not found and stored_remainders() != any(map(keeps_remainders, optimizers)):
        found.append("store_param_remainders")
    return found


def stock_stumbles(optimizer: Any, stored: int, resumes_in_place: bool, version: tuple[int, int]) -> bool:
    """Whether stock Megatron dies or goes wrong while it loads an intact torch_dist checkpoint, whatever the layout.

    Chained optimizers load only as many as were saved; experts have one of their own as soon as there is more than one
    expert-parallel rank (`ChainedOptimizer.load_state_dict`, megatron/core/optimizer/optimizer.py, core_v0.7.0 to
    0.19.2). Sources in megatron/core/optimizer/distrib_optimizer.py: with torch's own Adam (neither Apex nor
    Transformer Engine is installed) `state_dict` asserts that there is one step before there is any (core_v0.10.0 to
    0.19.2); `load_parameter_state_from_dp_reshardable`, which lacks `no_grad`, cannot copy into masters that are
    views of fp32 parameters (core_v0.15.0 to 0.19.2); and with HybridDeviceOptimizer it gives torch's Adam back the
    step of `dummy_step`, 1, and keeps FusedAdam at the saved step, without a message (core_v0.16.1 to 0.19.2). With
    `--use-precision-aware-optimizer` `_set_main_param_and_optimizer_states` takes a flag for a tensor (up to
    core_v0.16.1), and FusedAdam refuses remainders that `fully_reshardable` stores as fp32 (to 0.19.2).

    Args:
        optimizer: the live (chained) optimizer.
        stored: how many chained optimizers the checkpoint's common state tells of; 0 where it tells of none.
        resumes_in_place: it is `load_parameter_state_from_dp_reshardable` that stock would use.
        version: of the running megatron-core.
    """
    optimizers = distributed_optimizers(optimizer) or []
    try:
        check_supported(optimizers)
    except UnsupportedCheckpointError:
        return False
    if stored and stored != len(getattr(optimizer, "chained_optimizers", [optimizer])):
        return True
    if any(map(is_offloaded, optimizers)):
        return True
    if any(map(is_precision_aware, optimizers)) and resumes_in_place and version < (0, 17):
        return True
    if any(map(keeps_remainders, optimizers)) and not resumes_in_place:
        return True
    for child in optimizers:
        inner = child.optimizer
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and not inner.state:
            return True
        if resumes_in_place and any(p.dtype == torch.float32 for p in child.model_param_group_index_map):
            return True
    return False
