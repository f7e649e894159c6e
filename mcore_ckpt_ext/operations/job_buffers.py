"""How a job keeps its weights, its gradients and its optimizer, by its arguments."""

from __future__ import annotations

from math import prod

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import MAY_SPLIT_LAYER_WISE, PACKS_LAYER_WISE_BY_COMPUTATION, splits_layer_wise
from mcore_ckpt_ext.layout_choice.layer_wise import LayerWise
from mcore_ckpt_ext.layout_choice.memory import Buffers, Sharding
from mcore_ckpt_ext.layout_choice.model_sizes import fraction_of
from mcore_ckpt_ext.layout_choice.model_table import ModelTable
from mcore_ckpt_ext.optimizers.model_space_formats import is_layer_wise
from mcore_ckpt_ext.versions import Version


def buffers_of(job: JobArguments, table: ModelTable, version: Version) -> Buffers:
    """Return how a job of a release keeps its weights, its gradients and its optimizer, by its arguments."""
    is_fp32 = bool(job.accumulate_allreduce_grads_in_fp32) or not (job.bf16 or job.fp16)
    layer_wise = _layer_wise(job, table, version)
    is_aware = bool(job.use_precision_aware_optimizer)
    copies_gradients = not is_fp32 and not is_aware
    moments = [str(job.raw.get(name, "fp32")) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    return Buffers(
        4 if is_fp32 else 2,
        bool(job.use_distributed_optimizer) or layer_wise not in (None, LayerWise.DEALT),
        bool(job.ddp_pad_buckets_for_high_nccl_busbw),
        fraction_of(job, "optimizer_offload_fraction", 0.0) if job.optimizer_cpu_offload else 0.0,
        layer_wise,
        kept_on_device=0 if is_aware or not (job.bf16 or job.fp16) else 4,
        quantized_bytes=_quantized_bytes(job, table),
        # `_copy_model_grads_to_main_grads` (megatron/core/optimizer/distrib_optimizer.py): gradients in fp32.
        step_bytes=4 if copies_gradients else 0,
        # `FusedAdam.step` (transformer_engine/pytorch/optimizers/fused_adam.py): moments in fp32, if they are not.
        step_bytes_in_turn=4 * sum("32" not in dtype for dtype in moments) if is_aware else 0,
        sharding=_sharding(job),
    )


def _quantized_bytes(job: JobArguments, table: ModelTable) -> float:
    """Return the bytes of an average element of a weight for its fp8 copies, in addition to bf16.

    A linear layer keeps its quantized weight and the transposed one between micro batches
    (`TransformerEngineBaseModule.get_weight_workspace`, transformer_engine/pytorch/module/base.py); with
    `--fp8-param-gather` there is no weight in bf16, and two bytes in fp8 take its place.
    """
    if not job.raw.get("fp8") or job.fp8_param_gather:
        return 0.0
    linear = sum(
        prod(parameter.shape)
        for parameter in table.parameters
        if len(parameter.shape) == 2 and not parameter.is_vocabulary
    )
    return 2 * linear / max(table.elements, 1)


def _sharding(job: JobArguments) -> Sharding:
    """Return what data-parallel ranks share besides the optimizer: with FSDP, gradients or weights, too."""
    if job.raw.get("use_torch_fsdp2"):
        return Sharding.PARAMETERS
    strategy = job.raw.get("data_parallel_sharding_strategy")
    if not job.raw.get("use_megatron_fsdp") or strategy not in {sharding.value for sharding in Sharding}:
        return Sharding.OPTIMIZER
    return Sharding(strategy)


def _layer_wise(job: JobArguments, table: ModelTable, version: Version) -> LayerWise | None:
    """Return how a layer-wise optimizer distributes parameters; None for other optimizers.

    With biases in the experts, no part of it can be a DistributedOptimizer (`_get_megatron_emerging_optimizer`,
    megatron/core/optimizer/__init__.py, core_v0.19.1 and the development head of August 2026).
    """
    if not is_layer_wise(job):
        return None
    has_plain_experts = all(len(parameter.shape) == 2 for parameter in table.parameters if parameter.expert is not None)
    if job.raw.get("use_layer_wise_param_layout") is False or not has_plain_experts:
        return LayerWise.DEALT
    was_split = any(parameter.is_distributed for parameter in table.parameters)
    if not splits_layer_wise(version) and not (was_split and MAY_SPLIT_LAYER_WISE.is_of(version)):
        return LayerWise.DEALT
    by_computation = PACKS_LAYER_WISE_BY_COMPUTATION.is_of(version)
    return LayerWise.PACKED_BY_COMPUTATION if by_computation else LayerWise.PACKED_BY_SIZE
