"""Lists the layouts that can resume a checkpoint on a number of GPUs, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from mcore_ckpt_ext.continuity.batch_sizes import run_by, with_stated_batch
from mcore_ckpt_ext.continuity.data_order import data_order
from mcore_ckpt_ext.continuity.dependencies import Difference
from mcore_ckpt_ext.continuity.mathematics import differences_of_jobs
from mcore_ckpt_ext.continuity.order_change import DataOrder
from mcore_ckpt_ext.defaults import SCHEMAS
from mcore_ckpt_ext.errors import UsageError, reraise_as_unreadable
from mcore_ckpt_ext.families.passed_arguments import replaced_values, with_passed
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.arguments.kinds import MOST_RANKS
from mcore_ckpt_ext.job.dimensions import PINS
from mcore_ckpt_ext.layout.parallel import ParallelLayout, placement_changes
from mcore_ckpt_ext.layout_choice.fewer_gpus import with_fewer_gpus
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout, SearchRequest
from mcore_ckpt_ext.layout_choice.memory import Memory
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
from mcore_ckpt_ext.operations.options import Location, PlanOptions
from mcore_ckpt_ext.operations.parameter_table import table_of
from mcore_ckpt_ext.operations.resumptions import has_job, stock_resumes, writer_of
from mcore_ckpt_ext.operations.short_repr import ShortRepr

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
        options: the options of the plan.
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
    options: PlanOptions
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


def plan(path: Location, gpus: int, options: PlanOptions | None = None, **changes: object) -> LayoutPlan:
    """List the layouts that Megatron accepts for a checkpoint on a number of GPUs; reads only metadata.

    Args:
        path: a run folder (its newest iteration) or an iteration folder.
        gpus: the number of GPUs.
        options: the GPUs, the release that will run, and what is fixed or known of the job.
        **changes: single options by name, instead of or in addition to `options`: `plan(path, 8, pins={"tp": 8})`.

    Raises:
        UsageError: a value is invalid.
        TypeError: there is no option of that name.
        CheckpointError: the checkpoint cannot be read, or does not describe its model completely.

    Example:
        >>> found = plan("run", 4, pins={"pp": 1})
        >>> [one.layout for one in found.layouts], found.fits
        (['TP2 x PP1 x DP2', 'TP4 x PP1 x DP1', 'TP1 x PP1 x DP4'], True)
        >>> found.layouts[0].flags.split(" --")[0]
        '--tensor-model-parallel-size 2'
    """
    options = (options or PlanOptions()).with_changes(changes)
    check_gpus(gpus, options.gpus_per_node)
    with reraise_as_unreadable(path):
        return _Planning(open_checkpoint(path, facts=options.facts), gpus, options).plan()


class _Planning:
    """One plan: it completes the job of a checkpoint, and searches the layouts that can go on with it."""

    def __init__(self, checkpoint: CheckpointView, gpus: int, options: PlanOptions) -> None:
        self._checkpoint = checkpoint
        self._options = options
        self._stored = checkpoint.job.arguments()
        self._job = with_derived_arguments(
            checkpoint, with_passed(self._stored, with_stated_batch(self._stored, options.arguments))
        )
        self._version, self._version_source = release_of(checkpoint, options.megatron_version)
        self._old = ParallelLayout.from_arguments(self._job)
        self._table = table_of(checkpoint, self._job)
        self._buffers = buffers_of(self._job, self._table, self._version)
        self._request = SearchRequest(
            gpus,
            options.gpus_per_node,
            self._version,
            options.gpu_memory,
            recomputation=recomputation_of(self._job, options.recomputation),
            pins=_sizes_of(options.pins),
        )

    def plan(self) -> LayoutPlan:
        """Search, and return the layouts as data."""
        trained = has_job(self._checkpoint, writer_of(self._checkpoint))
        request, memory_source = self._with_memory(trained)
        running = run_by(with_recomputation(self._job, request.recomputation), self._version)
        result = search(running, self._table, self._old, request, self._buffers)
        least = min(result.found, key=lambda candidate: candidate.memory.total, default=None)
        most = self._options.most
        every: list[tuple[FoundLayout, list[int]]] = [(candidate, []) for candidate in result.found]
        chosen = every if most is None else join_virtual_stages(result.found)[:most]
        fewer: Sequence[FoundLayout] = ()
        if not self._options.pins:
            fewer = with_fewer_gpus(running, self._table, self._old, request, self._buffers, result.found)
        return LayoutPlan(
            schema=SCHEMA,
            path=str(self._checkpoint.files.folder),
            options=self._options,
            gpus=request.gpus,
            old_layout=str(self._old) if trained else "",
            megatron_version=str(self._version),
            megatron_version_source=self._version_source,
            parameters=_parameters(self._checkpoint),
            layouts=tuple(self._planned_layout(*row) for row in chosen),
            fewer=tuple(map(self._planned_layout, fewer)),
            accepted=len(result.found),
            least_memory=least.memory.total if least else None,
            least_layout=str(least.choice.layout) if least else None,
            gpu_memory=request.memory,
            gpu_memory_source=memory_source,
            excluded=dict(result.excluded),
            nearest=tuple((str(exclusion.layout), exclusion.reason) for exclusion in result.nearest_first),
            unknown=unknown_arguments(self._job),
            replaced=replaced_values(self._stored, self._options.arguments),
        )

    def _with_memory(self, trained: bool) -> tuple[SearchRequest, str]:
        """Return the request with the memory of a GPU, and where that number is from.

        Without a number it is the need of the old layout, as its job has run.
        """
        request = self._request
        if request.memory is not None:
            return request, "--gpu-memory"
        if not trained or self._old.unknown:
            return request, _NO_MEMORY
        recomputation = recomputation_of(self._job, None)
        as_before = replace(request, gpus=self._old.world, pins=self._old.model_sizes(), recomputation=recomputation)
        before = search(self._job, self._table, self._old, as_before, self._buffers).found
        if not before:
            return request, _NO_MEMORY
        source = f"at least: {self._old} needs it, and its job ran"
        return replace(request, memory=before[0].memory.total, is_least=True), source

    def _planned_layout(self, candidate: FoundLayout, virtual_stages: Sequence[int] = ()) -> PlannedLayout:
        job = self._job
        choice = candidate.choice
        layout = choice.layout
        running = run_by(job.replace(**arguments_of(candidate)), self._version)
        is_moved = bool(placement_changes(job, running))
        keeps = keeps_grid(layout, self._old)
        shares = choice.optimizer_ranks, choice.expert_optimizer_ranks
        in_all = sum(stage.bytes_read(*shares, layout.world // layout.pipeline) for stage in candidate.holdings)
        rate = self._options.read_rate
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
            seconds=None if rate is None else round(in_all / rate, 1),
            stock_resumes=stock_resumes(self._checkpoint, is_moved, self._version),
            keeps_random_state=keeps,
            data=data_order(job, running, self._options.data_samples),
            differences=differences_of_jobs(job, running, self._version),
            flags=" ".join([*flags_of(candidate), *recomputation_flags(candidate, job)]),
            removed_flags=tuple(removed_flags_of(candidate, job)),
            notes=tuple(notes_of(candidate, job, keeps)),
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


def _sizes_of(pins: Mapping[str, int]) -> dict[str, int]:
    unknown = [name for name in pins if name not in PINS]
    if unknown:
        raise UsageError("unknown dimension", found=unknown[0][:40], expected=", ".join(PINS))
    return {PINS[name]: size for name, size in pins.items()}
