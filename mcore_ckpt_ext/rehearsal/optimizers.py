"""Simulated optimizers with the attributes that the load decision reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.master_check import keeps_fp16_masters
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain

_FUSED_ADAM = frozenset({"bias_correction"})


@dataclass(frozen=True)
class SimulatedAdam:
    """The inner optimizer on GPUs: FusedAdam of Transformer Engine or Apex, as `load_facts` reads it.

    `store_param_remainders`: whether it keeps only the lower 16 bits of the masters.
    """

    param_groups: Sequence[dict[str, Any]]
    store_param_remainders: bool = False
    defaults: frozenset[str] = _FUSED_ADAM
    state: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SimulatedOffloaded(SimulatedAdam):
    """HybridDeviceOptimizer, which partly runs on the CPU."""

    sub_optimizers: Sequence[Any] = ()


@dataclass(frozen=True)
class SimulatedDistributed:
    """DistributedOptimizer.

    Attributes:
        config: the settings that the adapters of live optimizers read.
        gbuf_ranges: the dtypes of its gradient buffers, which contain no parameters here.
        model_param_group_index_map: a tensor of each dtype of its parameters.
    """

    optimizer: SimulatedAdam
    config: SimpleNamespace
    gbuf_ranges: Sequence[dict[tuple[torch.dtype, torch.dtype], Any]]
    model_param_group_index_map: Sequence[torch.Tensor]


@dataclass(frozen=True)
class SimulatedWhole:
    """An optimizer of whole parameters, replicated on all data-parallel ranks."""

    optimizer: SimulatedAdam


def simulated_chain(
    running: JobArguments, groups: Sequence[Sequence[dict[str, Any]]], dtypes: set[str], *, has_remainders: bool
) -> Chain:
    """Return the optimizers of a job that uses Adam.

    Args:
        running: the job's arguments.
        groups: the parameter groups of each of its optimizers.
        dtypes: the dtypes of its parameters.
        has_remainders: whether the checkpoint has remainders. It is assumed that the job's optimizer then uses them,
            which depends on installed packages.
    """
    is_aware = bool(running.use_precision_aware_optimizer)
    kind = SimulatedOffloaded if running.optimizer_cpu_offload else SimulatedAdam
    inner = [kind(param_groups, has_remainders and is_aware) for param_groups in groups]
    if not running.use_distributed_optimizer:
        return Chain((), [(SimulatedWhole(optimizer), None) for optimizer in inner], ())
    quantized = bool(running.raw.get("fp8_param_gather") or running.raw.get("fp4_param_gather"))
    config = SimpleNamespace(
        use_precision_aware_optimizer=is_aware,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=is_aware and not quantized,
        bf16=bool(running.bf16),
        main_params_dtype=torch.float16 if keeps_fp16_masters(running) else torch.float32,
    )
    parameters = [torch.empty(0, dtype=getattr(torch, name), device="meta") for name in sorted(dtypes)]
    kept = [torch.uint8] if quantized else [parameter.dtype for parameter in parameters]
    buffers: list[dict[tuple[torch.dtype, torch.dtype], Any]] = [{(dtype, torch.float32): []} for dtype in kept]
    return Chain([SimulatedDistributed(optimizer, config, buffers, parameters) for optimizer in inner], (), ())
