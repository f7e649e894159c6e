"""The jobs of the self-test on a machine, as pure data derived from the machine's resources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.optimizers.table import saved_format
from mcore_ckpt_ext.selftest.jobs import Job, Machine, layout_of
from mcore_ckpt_ext.selftest.models import EXPERTS, MODELS, arguments

_MOST_LAYOUTS = 9
_RESUMED = "optimizer resumed from"
_FAST = "--ckpt-ext-load: "
EIGHT_RANKS = "eight-ranks"
"""The job whose checkpoint is part of this package."""


def plan(machine: Machine) -> tuple[Job, ...]:
    """Return the jobs in the order in which they run; each follows the job whose checkpoint it resumes."""
    return (
        *_dense(machine),
        *_jobs_of_eight_ranks(machine),
        *_portable(machine),
        *_experts(machine),
        *_engine(machine),
    )


def layouts(ranks: int, layers: int) -> list[ParallelLayout]:
    """Return the layouts for this number of ranks that models allow, the least tensor parallelism first."""
    sizes = [1, 2, 4, 8]
    return [
        layout_of(ranks, tensor, pipeline)
        for tensor in sizes
        for pipeline in sizes
        if tensor <= MODELS["gpt"].heads and pipeline <= layers and ranks % (tensor * pipeline) == 0
    ]


def _interleaved_layout(machine: Machine) -> ParallelLayout | None:
    """Return the layout with virtual stages; None without two ranks and four layers."""
    return layout_of(machine.ranks, pipeline=2, virtual=2) if machine.ranks % 2 == 0 and machine.layers >= 4 else None


def _source(candidates: Sequence[ParallelLayout]) -> ParallelLayout:
    """Return the layout that saves: sharded in every dimension if ranks suffice, else into stages."""
    return max(
        candidates, key=lambda layout: (layout.tensor <= 2 and layout.pipeline <= 2, layout.pipeline, layout.tensor)
    )


def _dense(machine: Machine) -> Iterator[Job]:
    possible = layouts(machine.ranks, machine.layers)
    source = _source(possible)
    others = [layout for layout in possible if layout != source][:_MOST_LAYOUTS]
    if interleaved := _interleaved_layout(machine):
        others.append(interleaved)
    save = _saving_job(machine, "gpt", source, ("--async-save",), check="save, asynchronously")
    yield save
    for layout in others:
        yield _resuming_job(machine, save, layout, expects=_RESUMED)
    fast = ("--ckpt-ext-load", "fast")
    yield _resuming_job(machine, save, source, *fast, check="resume, fast load", expects=_FAST)
    once = ("--ckpt-ext-read-once",)
    layout = max(others, key=lambda layout: layout.data, default=source)
    yield _resuming_job(
        machine,
        save,
        layout,
        *once,
        check="resume, read once",
        expects=_RESUMED,
        skipped="" if layout.data > 1 else "no two ranks read the same: data parallelism needs 2 GPUs",
    )


def job_of_eight_ranks(machine: Machine) -> Job:
    """Return the job that saved the checkpoint of this package."""
    layout = layout_of(8, 2, 2)
    job = _saving_job(_drop_engine(machine), "tiny gpt", layout, (), check="save")
    return replace(job, name=EIGHT_RANKS)


def _drop_engine(machine: Machine) -> Machine:
    """Return the machine without Transformer Engine, which the checkpoint of this package does not use."""
    return replace(machine, no_engine="the checkpoint was saved without Transformer Engine")


def _jobs_of_eight_ranks(machine: Machine) -> Iterator[Job]:
    save = job_of_eight_ranks(machine)
    layout = layout_of(machine.ranks)
    samples = MODELS[save.model].samples
    skipped = (
        ""
        if samples % layout.data == 0
        else f"{quantity(samples, 'sample')} cannot be divided among {quantity(layout.data, 'rank')}"
    )
    yield _resuming_job(
        _drop_engine(machine), save, layout, check="resume, saved by 8 ranks", expects=_RESUMED, skipped=skipped
    )


def _portable(machine: Machine) -> Iterator[Job]:
    possible = layouts(machine.ranks, machine.layers)
    source = _source(possible)
    flags = ("--dist-ckpt-optim-fully-reshardable",)
    save = _saving_job(machine, "gpt", source, flags, portable=True, check="save")
    yield save
    yield _resuming_job(machine, save, max(possible, key=lambda layout: (layout != source, layout.tensor)), *flags)


def _experts(machine: Machine) -> Iterator[Job]:
    ranks = machine.ranks
    expert = min(EXPERTS, machine.ranks)
    source = layout_of(ranks, 1, 1, max(size for size in (1, 2, 4) if size <= expert and ranks % size == 0))
    save = _saving_job(machine, "experts", source, (), check="save")
    yield save
    sizes = ((1, 2, 1), (2, 1, 1), (2, 2, 2), (1, 1, 1))
    possible = [layout_of(ranks, *of_layout, expert_tensor=1) for of_layout in sizes]
    for layout in dict.fromkeys(possible):
        if layout != source and ranks % (layout.tensor * layout.pipeline * layout.expert) == 0:
            yield _resuming_job(machine, save, layout, expects=_RESUMED)
    if ranks == 1:
        yield _resuming_job(machine, save, source)


def _engine(machine: Machine) -> Iterator[Job]:
    """Yield the jobs in fp8 by Transformer Engine: with a scale for each tensor, and for each block."""
    possible = layouts(machine.ranks, machine.layers)
    yield from _jobs_in_fp8(machine, "gpt in fp8", "delayed", possible, machine.no_fp8)
    # Tensor parallelism would divide blocks.
    uncut = [layout for layout in possible if layout.tensor == 1]
    yield from _jobs_in_fp8(machine, "gpt in blockwise fp8", "blockwise", uncut, machine.no_blockwise)


def _jobs_in_fp8(
    machine: Machine, model: str, recipe: str, possible: Sequence[ParallelLayout], why_not: str
) -> Iterator[Job]:
    source = _source(possible)
    form = "e4m3" if recipe == "blockwise" else "hybrid"
    flags = ("--fp8-format", form, "--fp8-recipe", recipe)
    skipped = machine.no_engine or why_not
    save = _saving_job(machine, model, source, flags, check="save", skipped=skipped)
    # Otherwise Transformer Engine refuses its own pickled states (2.20: transformer_engine/pytorch/_extra_state.py).
    save = replace(save, environment={"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"})
    yield save
    target = max(possible, key=lambda layout: (layout != source, layout.data))
    expects = _RESUMED if target != source else ""
    yield _resuming_job(machine, save, target, *flags, expects=expects, skipped=skipped)


def _saving_job(
    machine: Machine,
    model: str,
    layout: ParallelLayout,
    flags: Sequence[str],
    *,
    check: str,
    portable: bool = False,
    skipped: str = "",
) -> Job:
    kind = saved_format(portable=portable)
    return Job(
        name=f"{model}-{kind}".replace(" ", "-"),
        model=model,
        format=kind,
        layout=layout,
        check=check,
        arguments=(*arguments(machine, model, layout), *flags),
        skipped=skipped,
    )


def _resuming_job(
    machine: Machine,
    save: Job,
    layout: ParallelLayout,
    *flags: str,
    check: str = "resume",
    expects: str = "",
    skipped: str = "",
) -> Job:
    return Job(
        name=f"{save.name}-{layout}-{check}".replace(",", "").replace(" ", "-").lower(),
        model=save.model,
        format=save.format,
        layout=layout,
        check=check,
        arguments=(*arguments(machine, save.model, layout), *flags),
        environment=save.environment,
        loads=save.name,
        expects=expects,
        skipped=skipped,
    )
