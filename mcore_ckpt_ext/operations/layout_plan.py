"""Lists the layouts that can resume a checkpoint on a number of GPUs, best first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from mcore_ckpt_ext.continuity.data_order import data_order
from mcore_ckpt_ext.continuity.mathematics import Difference
from mcore_ckpt_ext.continuity.order_change import DataOrder
from mcore_ckpt_ext.defaults import SCHEMAS
from mcore_ckpt_ext.errors import UsageError, reraise_as_unreadable
from mcore_ckpt_ext.families.passed_arguments import replaced_values, with_passed
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.arguments.kinds import MOST_RANKS
from mcore_ckpt_ext.job.dimensions import PINS
from mcore_ckpt_ext.job.facts import NOTHING, Facts
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout, placement_changes
from mcore_ckpt_ext.layout_choice.fewer_gpus import with_fewer_gpus
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout, SearchRequest
from mcore_ckpt_ext.layout_choice.memory import Buffers, Memory
from mcore_ckpt_ext.layout_choice.model_table import ModelTable
from mcore_ckpt_ext.layout_choice.order import bubble_fraction
from mcore_ckpt_ext.layout_choice.search import join_virtual_stages, search
from mcore_ckpt_ext.layout_choice.stage_activations import recomputation_of
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.assumed_release import release_of
from mcore_ckpt_ext.operations.job_buffers import buffers_of
from mcore_ckpt_ext.operations.known_arguments import unknown_arguments, with_derived_arguments
from mcore_ckpt_ext.operations.layout_flags import (
    arguments_of,
    flags_of,
    keeps_grid,
    notes_of,
    recomputation_flags,
    removed_flags_of,
    with_recomputation,
)
from mcore_ckpt_ext.operations.parameter_table import table_of
from mcore_ckpt_ext.operations.short_repr import ShortRepr
from mcore_ckpt_ext.operations.versions import has_job, stock_resumes, writer_of
from mcore_ckpt_ext.versions import Version

SCHEMA = SCHEMAS["plan"]
_NO_MEMORY = "unknown: pass --gpu-memory"


@dataclass(frozen=True)
class PlannedLayout:
    """One layout that Megatron accepts; sizes in bytes, of the fullest GPU.

    Attributes:
        gpus: the number of GPUs that it uses.
        layout: its sizes, in words.
        sizes: the size of each dimension.
        virtual_stages: other numbers of virtual stages that are as acceptable, best first; they are only listed by
            themselves if all layouts are.
        layers_per_stage: the number of decoder layers of each pipeline rank.
        fits: True if it fits; None if that is unknown: no memory size is given and the old layout needed less.
        memory: weights, gradients, optimizer, and the terms of the estimate.
        bubble: the idle share of the pipeline, 0 to 1.
        micro_batch_size: the number of samples that a rank processes at once.
        global_batch_size: the number of samples of an iteration; None if that of the job is unknown.
        read_per_rank: bytes that the fullest rank reads.
        read_in_all: bytes that all ranks read.
        read_once: bytes that are read with `--ckpt-ext-read-once`.
        seconds: the duration of reading at the given rate; None without one.
        stock_resumes: stock Megatron resumes it, with its optimizer, without this package.
        keeps_random_state: random states are restored.
        data: whether the data goes on in the same order.
        differences: all that training computes otherwise than before, apart from rounding.
        flags: flags for the job's command line.
        removed_flags: flags of the old job that contradict these, and must not be given.
        notes: changes for the user.
    """

    gpus: int
    layout: str
    sizes: Mapping[str, int]
    virtual_stages: tuple[int, ...]
    layers_per_stage: tuple[int, ...]
    fits: bool | None
    memory: Memory
    bubble: float
    micro_batch_size: int
    global_batch_size: int | None
    read_per_rank: int
    read_in_all: int
    read_once: int
    seconds: float | None
    stock_resumes: bool
    keeps_random_state: bool
    data: DataOrder
    differences: tuple[Difference, ...]
    flags: str
    removed_flags: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class LayoutPlan(ShortRepr):
    """The result of `plan`.

    Attributes:
        path: the folder of the checkpoint.
        gpus: the number of GPUs for which layouts are listed.
        old_layout: the layout of the job that saved the checkpoint; empty without a job.
        megatron_version: the release that will run.
        megatron_version_source: where that number is from.
        parameters: the number of parameters in the checkpoint, rows of padding included.
        layouts: accepted layouts, best first, as many as requested; if that is not all, layouts that differ in virtual
            stages alone are one.
        fewer: the best layouts of fewer GPUs that keep the tensor parallel size and the batch, if the best layout of
            all GPUs does not; first those that an elastic job prefers.
        accepted: the number of accepted layouts.
        least_memory: the least memory of a GPU, in bytes, with which any accepted layout works; None if none is
            accepted.
        least_layout: the layout that needs `least_memory`.
        gpu_memory: bytes of a GPU; if not given, the need of the old layout by the same estimate.
        gpu_memory_source: where that number is from.
        excluded: how many combinations each rule of Megatron excluded.
        nearest: for each rule, the excluded layout that is nearest to the old one, and the reason: (layout, reason).
        unknown: arguments of the job that are unknown, and count as their defaults.
        replaced: arguments that were passed although the checkpoint stores another value, with both values.
    """

    schema: int
    path: str
    gpus: int
    old_layout: str
    megatron_version: str
    megatron_version_source: str
    parameters: int
    layouts: tuple[PlannedLayout, ...]
    fewer: tuple[PlannedLayout, ...]
    accepted: int
    least_memory: int | None
    least_layout: str | None
    gpu_memory: int | None
    gpu_memory_source: str
    excluded: Mapping[str, int]
    nearest: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    replaced: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True if at least one layout is accepted and fits."""
        return any(layout.fits is not False for layout in self.layouts)


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
    arguments: Mapping[str, object] | None = None,
    data_samples: int | None = None,
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
        most: how many layouts are listed, one of those that differ in virtual stages alone; None for all.
        facts: facts about the job that wrote a checkpoint without Megatron's arguments, such as its layout.
        arguments: arguments of the job that the checkpoint does not state, by name.
        data_samples: the samples of the data set, to count those that a random sampler reads again or never.

    Raises:
        UsageError: a value is invalid.
        CheckpointError: the checkpoint cannot be read, or does not describe its model completely.

    Example:
        >>> found = plan("run", 4, pins={"pp": 1})
        >>> [one.layout for one in found.layouts], found.fits
        (['TP2 x PP1 x DP2', 'TP4 x PP1 x DP1', 'TP1 x PP1 x DP4'], True)
        >>> found.layouts[0].flags.split(" --")[0]
        '--tensor-model-parallel-size 2'
    """
    check_gpus(gpus, gpus_per_node)
    with reraise_as_unreadable(path):
        checkpoint = open_checkpoint(path, facts=facts)
        stated: Mapping[str, Any] = arguments or {}
        job = with_derived_arguments(checkpoint, with_passed(checkpoint.job.arguments(), stated))
        version, release_source = release_of(checkpoint, megatron_version)
        old = ParallelLayout.from_arguments(job)
        table = table_of(checkpoint, job)
        buffers = buffers_of(job, table, version)
        sizes = _sizes_of(pins or {})
        recomputed = recomputation_of(job, recomputation)
        request = SearchRequest(gpus, gpus_per_node, version, gpu_memory, recomputation=recomputed, pins=sizes)
        source = "--gpu-memory"
        trained = has_job(checkpoint, writer_of(checkpoint))
        if gpu_memory is None and not trained:
            source = _NO_MEMORY
        elif gpu_memory is None:
            request, source = _as_before(job, table, old, request, buffers)
        running = with_recomputation(job, request.recomputation)
        result = search(running, table, old, request, buffers)
        least = min(result.found, key=lambda candidate: candidate.memory.total, default=None)
        every: list[tuple[FoundLayout, list[int]]] = [(candidate, []) for candidate in result.found]
        chosen = every if most is None else join_virtual_stages(result.found)[:most]

        def planned(candidate: FoundLayout, virtual_stages: Sequence[int] = ()) -> PlannedLayout:
            return _planned(candidate, virtual_stages, checkpoint, job, version, read_rate, data_samples)

        fewer = [] if pins else with_fewer_gpus(running, table, old, request, buffers, result.found)
        return LayoutPlan(
            schema=SCHEMA,
            path=str(checkpoint.files.folder),
            gpus=gpus,
            old_layout=str(old) if trained else "",
            megatron_version=str(version),
            megatron_version_source=release_source,
            parameters=_parameters(checkpoint),
            layouts=tuple(planned(*row) for row in chosen),
            fewer=tuple(map(planned, fewer)),
            accepted=len(result.found),
            least_memory=least.memory.total if least else None,
            least_layout=str(least.choice.layout) if least else None,
            gpu_memory=request.memory,
            gpu_memory_source=source,
            excluded=dict(result.excluded),
            nearest=tuple((str(exclusion.layout), exclusion.reason) for exclusion in result.nearest_first),
            unknown=unknown_arguments(job),
            replaced=replaced_values(checkpoint.job.arguments(), stated),
        )


def _parameters(checkpoint: CheckpointView) -> int:
    """Return the number of parameters in a checkpoint, as `inspect` counts them."""
    tensors = (checkpoint.logical_tensor(WEIGHT, name) for name in checkpoint.names(WEIGHT))
    return sum(prod(tensor.shape) for tensor in tensors if tensor is not None)


def check_gpus(*numbers: int) -> None:
    """Refuse numbers of GPUs that no job has.

    Raises:
        UsageError: a number is not positive, or far beyond the largest jobs.
    """
    for number in numbers:
        if not isinstance(number, int) or not 1 <= number <= MOST_RANKS:
            raise UsageError("no job has so many GPUs", found=f"{number!r}", expected=f"1 to {MOST_RANKS:,}")


def _as_before(
    job: JobArguments, table: ModelTable, old: ParallelLayout, request: SearchRequest, buffers: Buffers
) -> tuple[SearchRequest, str]:
    """Set the memory to the need of the old layout, as its job has run."""
    request_before = replace(request, gpus=old.world, pins=old.model_sizes(), recomputation=recomputation_of(job, None))
    before = search(job, table, old, request_before, buffers).found
    if not before or old.unknown:
        return request, _NO_MEMORY
    return replace(request, memory=before[0].memory.total, is_least=True), f"at least: {old} needs it, and its job ran"


def _sizes_of(pins: Mapping[str, int]) -> dict[str, int]:
    unknown = [name for name in pins if name not in PINS]
    if unknown:
        raise UsageError("unknown dimension", found=unknown[0][:40], expected=", ".join(PINS))
    return {PINS[name]: size for name, size in pins.items()}


def _planned(
    candidate: FoundLayout,
    virtual_stages: Sequence[int],
    checkpoint: CheckpointView,
    job: JobArguments,
    version: Version,
    read_rate: int | None,
    data_samples: int | None,
) -> PlannedLayout:
    choice = candidate.choice
    layout = choice.layout
    running = job.replace(**arguments_of(candidate))
    is_moved = bool(placement_changes(job, running))
    keeps = keeps_grid(layout, ParallelLayout.from_arguments(job))
    shares = choice.optimizer_ranks, choice.expert_optimizer_ranks
    in_all = sum(stage.bytes_read(*shares, layout.world // layout.pipeline) for stage in candidate.holdings)
    return PlannedLayout(
        gpus=layout.world,
        layout=str(layout),
        sizes={label: getattr(layout, name) for label, name in PINS.items()} | {"dp": layout.data},
        virtual_stages=tuple(virtual_stages),
        layers_per_stage=tuple(map(sum, choice.split.layers)) if choice.split else (),
        fits=candidate.fits,
        memory=candidate.memory,
        bubble=round(bubble_fraction(choice), 4),
        micro_batch_size=choice.micro_batch,
        global_batch_size=choice.global_batch if job.global_batch_size is not None else None,
        read_per_rank=max(stage.bytes_read(*shares) for stage in candidate.holdings),
        read_in_all=in_all,
        read_once=choice.table.stored_bytes,
        seconds=None if read_rate is None else round(in_all / read_rate, 1),
        stock_resumes=stock_resumes(checkpoint, is_moved, version),
        keeps_random_state=keeps,
        data=data_order(job, running, data_samples),
        differences=candidate.differences,
        flags=" ".join([*flags_of(candidate), *recomputation_flags(candidate, job)]),
        removed_flags=tuple(removed_flags_of(candidate, job)),
        notes=tuple(notes_of(candidate, job, keeps)),
    )
