"""Lists the layouts that can resume a checkpoint on a number of GPUs, best first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from mcore_ckpt_ext.defaults import SCHEMAS
from mcore_ckpt_ext.errors import UsageError, reraise_as_unreadable
from mcore_ckpt_ext.families.forward_pass import refuse_unknown_names
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.target import version_number
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.arguments.kinds import MOST_RANKS
from mcore_ckpt_ext.job.facts import NOTHING, Facts
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import MAY_SPLIT_LAYER_WISE, PACKS_LAYER_WISE_BY_COMPUTATION, splits_layer_wise
from mcore_ckpt_ext.layout.parallel import ParallelLayout, placement_changes
from mcore_ckpt_ext.layout_choice.layer_wise import LayerWise
from mcore_ckpt_ext.layout_choice.memory import Buffers, Memory, Sharding
from mcore_ckpt_ext.layout_choice.model_sizes import fraction_of
from mcore_ckpt_ext.layout_choice.model_table import ModelTable
from mcore_ckpt_ext.layout_choice.options import PINS, Recomputation
from mcore_ckpt_ext.layout_choice.search import FoundLayout, SearchRequest, search
from mcore_ckpt_ext.operations.known_arguments import unknown_arguments, with_shown_arguments
from mcore_ckpt_ext.operations.layout_flags import arguments_of, flags_of, notes_of
from mcore_ckpt_ext.operations.parameter_table import table_of
from mcore_ckpt_ext.operations.versions import has_job, writer_of
from mcore_ckpt_ext.optimizers.model_space_formats import is_layer_wise
from mcore_ckpt_ext.optimizers.table import stock_can_load
from mcore_ckpt_ext.versions import Version

SCHEMA = SCHEMAS["plan"]
_NO_MEMORY = "unknown: pass --gpu-memory"


@dataclass(frozen=True)
class PlannedLayout:
    """One layout that Megatron accepts; sizes in bytes, of the fullest GPU.

    Attributes:
        layout: its sizes, in words.
        sizes: the size of each dimension.
        layers_per_stage: the number of decoder layers of each pipeline rank.
        fits: True if it fits; None if that is unknown: no memory size is given and the old layout needed less.
        memory: weights, gradients, optimizer, and the terms of the estimate.
        bubble: the idle share of the pipeline, 0 to 1.
        micro_batch_size: the number of samples that a rank processes at once.
        global_batch_size: the number of samples of an iteration.
        read_per_rank: bytes that the fullest rank reads.
        read_in_all: bytes that all ranks read.
        read_once: bytes that are read with `--ckpt-ext-read-once`.
        seconds: the duration of reading at the given rate; None without one.
        stock_resumes: stock Megatron resumes the optimizer without this package.
        keeps_random_state: random states are restored.
        flags: flags for the job's command line.
        notes: changes for the user.
    """

    layout: str
    sizes: Mapping[str, int]
    layers_per_stage: tuple[int, ...]
    fits: bool | None
    memory: Memory
    bubble: float
    micro_batch_size: int
    global_batch_size: int
    read_per_rank: int
    read_in_all: int
    read_once: int
    seconds: float | None
    stock_resumes: bool
    keeps_random_state: bool
    flags: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class LayoutPlan:
    """The result of `plan`.

    Attributes:
        old_layout: the layout of the job that saved the checkpoint; empty without a job.
        layouts: accepted layouts, best first, as many as requested.
        accepted: the number of accepted layouts.
        least_memory: the least memory of a GPU, in bytes, with which any accepted layout works; None if none is
            accepted.
        least_layout: the layout that needs `least_memory`.
        gpu_memory: bytes of a GPU; if not given, the need of the old layout by the same estimate.
        gpu_memory_source: where that number is from.
        excluded: how many combinations each rule of Megatron excluded.
        nearest: for each rule, the excluded layout that is nearest to the old one, and the reason: (layout, reason).
        unknown: arguments of the job that are unknown, and count as their defaults.
    """

    schema: int
    path: str
    gpus: int
    old_layout: str
    megatron_version: str
    parameters: int
    layouts: tuple[PlannedLayout, ...]
    accepted: int
    least_memory: int | None
    least_layout: str | None
    gpu_memory: int | None
    gpu_memory_source: str
    excluded: Mapping[str, int]
    nearest: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True if at least one layout is accepted and fits."""
        return any(one.fits is not False for one in self.layouts)


def plan(
    path: str | os.PathLike[str],
    gpus: int,
    *,
    gpus_per_node: int = 8,
    gpu_memory: int | None = None,
    megatron_version: str | None = None,
    pins: Mapping[str, int] | None = None,
    recomputation: str | None = None,
    read_rate: int | None = None,
    most: int | None = 10,
    facts: Facts = NOTHING,
    arguments: Mapping[str, Any] | None = None,
) -> LayoutPlan:
    """List the layouts that Megatron accepts for a checkpoint on a number of GPUs; reads only metadata.

    Args:
        path: a run folder (its newest iteration) or an iteration folder.
        gpus: the number of GPUs.
        gpus_per_node: the GPUs of a node; layouts with larger tensor parallelism cross nodes, and come last.
        gpu_memory: bytes of a GPU; by default at least the need of the old layout by the same estimate.
        megatron_version: the release that will run; by default the installed one, else the newest known.
        pins: fixed sizes: `{"tp": 8}`.
        recomputation: `none`, `selective` or `full`; by default that of the job.
        read_rate: bytes a second that all GPUs together read from the store.
        most: how many layouts are listed; None for all.
        facts: facts about the job that wrote a checkpoint without Megatron's arguments, such as its layout.
        arguments: arguments of the job that the checkpoint does not state, by name.

    Raises:
        UsageError: a value is invalid.
        CheckpointError: the checkpoint cannot be read, or does not describe its model completely.
    """
    check_gpus(gpus, gpus_per_node)
    with reraise_as_unreadable(path):
        checkpoint = open_checkpoint(path, facts=facts)
        refuse_unknown_names(arguments or {})
        job = with_shown_arguments(checkpoint, checkpoint.arguments.replace(**(arguments or {})))
        version = version_number(megatron_version)
        old = ParallelLayout.from_arguments(job)
        table = table_of(checkpoint, job)
        buffers = buffers_of(job, table, version)
        request = SearchRequest(
            gpus, gpus_per_node, version, gpu_memory, recomputation=recomputation_of(job, recomputation),
            pins=_sizes_of(pins or {}),
        )  # fmt: skip
        source, trained = "--gpu-memory", has_job(checkpoint, writer_of(checkpoint))
        if gpu_memory is None and not trained:
            source = _NO_MEMORY
        elif gpu_memory is None:
            request, source = _as_before(job, table, old, request, buffers)
        result = search(job, table, old, request, buffers)
        least = min(result.found, key=lambda one: one.memory.total, default=None)
        chosen = result.found if most is None else result.found[:most]
        return LayoutPlan(
            schema=SCHEMA,
            path=str(checkpoint.folder),
            gpus=gpus,
            old_layout=str(old) if trained else "",
            megatron_version=str(version),
            parameters=table.elements,
            layouts=tuple(_planned(one, checkpoint, job, old, version, read_rate) for one in chosen),
            accepted=len(result.found),
            least_memory=least.memory.total if least else None,
            least_layout=str(least.choice.layout) if least else None,
            gpu_memory=request.memory,
            gpu_memory_source=source,
            excluded=dict(result.excluded),
            nearest=tuple(
                (str(layout), reason) for _, layout, reason in sorted(result.nearest.values(), key=lambda one: one[0])
            ),
            unknown=unknown_arguments(job),
        )


def check_gpus(*numbers: int) -> None:
    """Refuse numbers of GPUs that no job has.

    Raises:
        UsageError: a number is not positive, or far beyond the largest jobs.
    """
    for number in numbers:
        if not 1 <= number <= MOST_RANKS:
            raise UsageError("no job has so many GPUs", found=f"{number}", expected=f"1 to {MOST_RANKS:,}")


def _as_before(
    job: JobArguments, table: ModelTable, old: ParallelLayout, request: SearchRequest, buffers: Buffers
) -> tuple[SearchRequest, str]:
    """Set the memory to the need of the old layout, as its job has run."""
    pins = {name: getattr(old, name) for name in PINS.values()}
    before = search(job, table, old, replace(request, gpus=old.world, pins=pins), buffers).found
    if not before or old.unknown:
        return request, _NO_MEMORY
    return replace(request, memory=before[0].memory.total, is_least=True), f"at least: {old} needs it, and its job ran"


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
        step_bytes_in_turn=4 * sum("32" not in one for one in moments) if is_aware else 0,
        sharding=_sharding(job),
    )


def _quantized_bytes(job: JobArguments, table: ModelTable) -> float:
    """Return the bytes of an average element of a weight for its copies in fp8, kept beside the weight in bf16.

    A linear layer keeps its quantized weight and the transposed one between micro batches
    (`TransformerEngineBaseModule.get_weight_workspace`, transformer_engine/pytorch/module/base.py); with
    `--fp8-param-gather` there is no weight in bf16, and two bytes in fp8 take its place.
    """
    if not job.raw.get("fp8") or job.fp8_param_gather:
        return 0.0
    linear = sum(prod(one.shape) for one in table.parameters if len(one.shape) == 2 and not one.is_vocabulary)
    return 2 * linear / max(table.elements, 1)


def _sharding(job: JobArguments) -> Sharding:
    """Return what data-parallel ranks share beside the optimizer: with FSDP, gradients or weights, too."""
    if job.raw.get("use_torch_fsdp2"):
        return Sharding.PARAMETERS
    strategy = job.raw.get("data_parallel_sharding_strategy")
    if not job.raw.get("use_megatron_fsdp") or strategy not in {one.value for one in Sharding}:
        return Sharding.OPTIMIZER
    return Sharding(strategy)


def _layer_wise(job: JobArguments, table: ModelTable, version: Version) -> LayerWise | None:
    """Return how a layer-wise optimizer distributes parameters; None for other optimizers.

    With biases in the experts, no part of it can be a DistributedOptimizer (`_get_megatron_emerging_optimizer`,
    megatron/core/optimizer/__init__.py, core_v0.19.1 and the development head of August 2026).
    """
    if not is_layer_wise(job):
        return None
    has_plain_experts = all(len(one.shape) == 2 for one in table.parameters if one.expert is not None)
    if job.raw.get("use_layer_wise_param_layout") is False or not has_plain_experts:
        return LayerWise.DEALT
    was_split = any(one.is_distributed for one in table.parameters)
    if not splits_layer_wise(version) and not (was_split and MAY_SPLIT_LAYER_WISE.is_of(version)):
        return LayerWise.DEALT
    by_computation = PACKS_LAYER_WISE_BY_COMPUTATION.is_of(version)
    return LayerWise.PACKED_BY_COMPUTATION if by_computation else LayerWise.PACKED_BY_SIZE


def recomputation_of(job: JobArguments, wanted: str | None) -> Recomputation:
    """Return the recomputation that is wanted, or that of the job.

    Raises:
        UsageError: its name is unknown.
    """
    text = wanted or job.raw.get("recompute_granularity") or "none"
    try:
        return Recomputation(text)
    except ValueError:
        raise UsageError(
            "unknown activation recomputation",
            found=str(text)[:40],
            expected=", ".join(one.value for one in Recomputation),
        ) from None


def _sizes_of(pins: Mapping[str, int]) -> dict[str, int]:
    unknown = [name for name in pins if name not in PINS]
    if unknown:
        raise UsageError("unknown dimension", found=unknown[0][:40], expected=", ".join(PINS))
    return {PINS[name]: size for name, size in pins.items()}


def _planned(
    one: FoundLayout,
    checkpoint: CheckpointView,
    job: JobArguments,
    old: ParallelLayout,
    version: Version,
    read_rate: int | None,
) -> PlannedLayout:
    choice, layout = one.choice, one.choice.layout
    running = job.replace(**arguments_of(one))
    is_moved = bool(placement_changes(job, running))
    keeps = (layout.tensor, layout.pipeline) == (old.tensor, old.pipeline)
    per_rank = [
        stage.dense.bytes_read(layout.data * layout.context) + stage.experts.bytes_read(layout.expert_data)
        for stage in one.holdings
    ]
    in_all = sum(per_rank) * (layout.world // layout.pipeline)
    return PlannedLayout(
        layout=str(layout),
        sizes={label: getattr(layout, name) for label, name in PINS.items()} | {"dp": layout.data},
        layers_per_stage=tuple(map(sum, choice.split.layers)) if choice.split else (),
        fits=one.fits,
        memory=one.memory,
        bubble=round(one.bubble, 4),
        micro_batch_size=choice.micro_batch,
        global_batch_size=choice.global_batch,
        read_per_rank=max(per_rank),
        read_in_all=in_all,
        read_once=choice.table.stored_bytes,
        seconds=None if read_rate is None else round(in_all / read_rate, 1),
        stock_resumes=checkpoint.optimizer_format is None
        or stock_can_load(checkpoint.optimizer_format, is_moved, version),
        keeps_random_state=keeps,
        flags=" ".join(flags_of(one)),
        notes=tuple(notes_of(one, job, keeps)),
    )
