"""`mcore-ckpt plan`: list layouts for a number of GPUs that can resume a checkpoint, or rehearse one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcore_ckpt_ext.cli.facts import add_facts, facts_of
from mcore_ckpt_ext.cli.output import BAD, GOOD, REMARKABLE, Painted, heading, line, table
from mcore_ckpt_ext.cli.page import check_place, plan_page
from mcore_ckpt_ext.cli.rehearsal import add_rehearsal, check_rehearsal, run_rehearsal, show_flags
from mcore_ckpt_ext.cli.report import report
from mcore_ckpt_ext.cli.sizes import parse_count, parse_size
from mcore_ckpt_ext.cli.terminal import terminal_width
from mcore_ckpt_ext.continuity.mathematics import sentence_of
from mcore_ckpt_ext.errors import counted, format_bytes, format_ranks, join_some
from mcore_ckpt_ext.job.dimensions import PINS, with_defaults
from mcore_ckpt_ext.layout_choice.options import Recomputation, parse_sizes
from mcore_ckpt_ext.storage.paths import as_path

if TYPE_CHECKING:
    from mcore_ckpt_ext.layout_choice.memory import Memory
    from mcore_ckpt_ext.operations.layout_plan import LayoutPlan, PlannedLayout

_HEADER = ("layout", "layers", "memory", "fits", "bubble", "batch", "read/rank", "all read", "stock resumes")
# The width of the whole table, and the number of columns on a narrower terminal.
_WIDTH = 120
_NARROW = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("path", metavar="RUN", help="run folder (newest iteration) or iteration folder")
    parser.add_argument("--gpus", type=parse_count, required=True, metavar="N", help="number of GPUs to plan for")
    parser.add_argument(
        "--gpus-per-node", type=parse_count, default=8, metavar="N", help="GPUs of a machine; default: 8"
    )
    parser.add_argument(
        "--gpu-memory",
        type=parse_size,
        metavar="SIZE",
        help="memory of a GPU, such as 80GiB; default: what the old layout needs, by the same estimate",
    )
    parser.add_argument(
        "--megatron-version", metavar="V", help="Megatron release that will run; default: the installed one"
    )
    parser.add_argument(
        "--pin", nargs="+", action="extend", default=[], metavar="DIM=N", help=f"fix a dimension: {', '.join(PINS)}"
    )
    parser.add_argument(
        "--recompute",
        choices=[recomputation.value for recomputation in Recomputation],
        help="activation recomputation; default: as in the job that wrote the checkpoint",
    )
    parser.add_argument(
        "--read-rate", type=parse_size, metavar="SIZE", help="bytes per second that all GPUs together read from storage"
    )
    parser.add_argument(
        "--argument",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="Megatron argument used in training, if it is missing from the checkpoint",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="list every layout, each number of virtual stages by itself, not only the ten best",
    )
    add_rehearsal(parser)
    parser.add_argument("--html", metavar="FILE", type=as_path, help="also write a self-contained page")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_facts(parser)


def run(arguments: argparse.Namespace) -> int:
    """List the layouts, or rehearse one; return 1 if none is accepted or fits, or the resume is refused."""
    check_rehearsal(arguments)
    if arguments.html is not None:
        check_place(arguments.html)
    if arguments.rehearse is not None:
        return run_rehearsal(arguments)
    from mcore_ckpt_ext.job.assignments import parse_assignments
    from mcore_ckpt_ext.operations.layout_plan import plan

    layout_plan = plan(
        arguments.path,
        arguments.gpus,
        gpus_per_node=arguments.gpus_per_node,
        gpu_memory=arguments.gpu_memory,
        megatron_version=arguments.megatron_version,
        pins=parse_sizes(" ".join(arguments.pin)),
        recomputation=arguments.recompute,
        read_rate=arguments.read_rate,
        most=None if arguments.all else 10,
        facts=facts_of(arguments),
        arguments=parse_assignments(arguments.argument),
    )
    return report(arguments, "plan", layout_plan, page=plan_page, show=_show, exit_code=0 if layout_plan.fits else 1)


def _show(plan: LayoutPlan) -> None:
    line(plan.path)
    size = "" if plan.gpu_memory is None else f"{format_bytes(plan.gpu_memory)}, "
    table(
        [
            ("written by", plan.old_layout or "no job"),
            ("for", f"{counted(plan.gpus, 'GPU')}, Megatron {plan.megatron_version} ({plan.megatron_version_source})"),
            ("parameters", f"{plan.parameters:,}"),
            ("memory of a GPU", f"{size}{plan.gpu_memory_source}"),
        ]
    )
    if plan.unknown:
        line(f"  missing from the checkpoint, defaults assumed: {', '.join(plan.unknown)}; set them with --argument")
    if plan.layouts:
        _show_layouts(plan)
    else:
        line()
        line(Painted(f"no layout of {counted(plan.gpus, 'GPU')} is accepted", BAD))
    if not plan.fits:
        _show_what_excludes(plan)
    if plan.fewer:
        _show_fewer(plan.fewer)


def _show_layouts(plan: LayoutPlan) -> None:
    listed = len(plan.layouts)
    heading(
        f"layouts that Megatron accepts: {listed} of {plan.accepted}, best first"
        if listed < plan.accepted
        else f"layouts that Megatron accepts: {listed}, best first"
    )
    # A narrow terminal omits the last columns, which are the same for most layouts; --json has them.
    shown_columns = len(_HEADER) if (terminal_width() or _WIDTH) >= _WIDTH else _NARROW
    table(
        (_cells(planned)[:shown_columns] for planned in plan.layouts),
        header=_HEADER[:shown_columns],
        right=(2, 4, 6),
    )
    _show_virtual_stages(plan.layouts)
    _show_data(plan.layouts)
    _show_differences(plan.layouts)
    best = plan.layouts[0]
    show_flags(f"flags for {best.layout}", best)
    memory = best.memory
    line(
        f"  memory of the fullest GPU: weights {format_bytes(memory.weights)}, "
        f"gradients {format_bytes(memory.gradients)}, optimizer {format_bytes(memory.optimizer)}, "
        f"activations {_activations(plan)}"
    )
    line(f"  and for a while: {_short_lived(memory)}; CUDA and NCCL {format_bytes(memory.context)}")
    if memory.host:
        line(f"  in the memory of its host: {format_bytes(memory.host)} of the optimizer")
    line(
        f"  read by all ranks: {format_bytes(best.read_in_all)}; "
        f"with --ckpt-ext-read-once: {format_bytes(best.read_once)}"
    )
    line(f"  to rehearse it: --gpus {plan.gpus} --rehearse '{_in_pins(best)}'")


def _show_fewer(layouts: Sequence[PlannedLayout]) -> None:
    heading("layouts of fewer GPUs that keep the tensor parallel size and the batch")
    rows = (
        (
            str(planned.gpus),
            planned.layout,
            format_bytes(planned.memory.total),
            _batch(planned),
            f"{planned.bubble:.0%}",
        )
        for planned in layouts
    )
    table(rows, header=("GPUs", "layout", "memory", "batch", "bubble"), right=(0, 2, 4))


def _show_virtual_stages(layouts: Sequence[PlannedLayout]) -> None:
    """Name the layouts that stand for others, which differ in virtual stages alone."""
    by_stages: dict[str, list[str]] = {}
    for planned in layouts:
        if planned.virtual_stages:
            by_stages.setdefault(format_ranks(sorted(planned.virtual_stages)), []).append(planned.layout)
    for stages, names in by_stages.items():
        line(f"  or with VPP {stages}: {join_some(names)}")


def _show_data(layouts: Sequence[PlannedLayout]) -> None:
    """Name the layouts under which the data does not go on in its order, or only with this package."""
    by_sentence: dict[str, list[str]] = {}
    for planned in layouts:
        if planned.data.is_remarkable:
            hint = f"; it goes on with {planned.data.hint}" if planned.data.hint else ""
            by_sentence.setdefault(f"{planned.data.sentence}{hint}", []).append(planned.layout)
    for sentence, names in by_sentence.items():
        line(f"  {sentence}: {'all' if len(names) == len(layouts) else join_some(names)}")


def _show_differences(layouts: Sequence[PlannedLayout]) -> None:
    """Name the layouts under which training computes the same but for rounding, and why others do not."""
    by_sentence: dict[str, list[str]] = {}
    for planned in layouts:
        by_sentence.setdefault(sentence_of(planned.differences), []).append(planned.layout)
    for sentence, names in by_sentence.items():
        line(f"  {sentence}: {'all' if len(names) == len(layouts) else join_some(names)}")


def _in_pins(planned: PlannedLayout) -> str:
    """Return the sizes of a layout for `--rehearse`, without default sizes."""
    assumed = with_defaults({"tensor": planned.sizes["tp"]}) | {"tensor": 1}
    named = [f"{label}={planned.sizes[label]}" for label, name in PINS.items() if planned.sizes[label] != assumed[name]]
    return " ".join(named) or "tp=1"


def _short_lived(memory: Memory) -> str:
    """Return what is not needed at the same time: only the largest counts."""
    parts = {"the loss": memory.loss, "a layer's backward pass": memory.backward, "the optimizer's step": memory.step}
    return ", or ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size) or "nothing"


def _activations(plan: LayoutPlan) -> str:
    lacking = [name for name in ("seq_length", "hidden_size") if name in plan.unknown]
    return (
        f"not known without {lacking[0]}"
        if lacking
        else f"{format_bytes(plan.layouts[0].memory.activations)} (an estimate)"
    )


def _show_what_excludes(plan: LayoutPlan) -> None:
    if plan.least_memory is not None:
        line()
        least = f"{format_bytes(plan.least_memory)} ({plan.least_layout})"
        line(Painted(f"no layout fits: the smallest needs {least}", BAD))
        line("hint: --recompute full keeps fewer activations; --all lists every layout")
    elif plan.nearest:
        heading("why the nearest layouts are excluded")
        table(plan.nearest)


def _cells(planned: PlannedLayout) -> tuple[str | Painted, ...]:
    return (
        planned.layout,
        _split(planned),
        format_bytes(planned.memory.total),
        _fit(planned),
        f"{planned.bubble:.0%}",
        _batch(planned),
        format_bytes(planned.read_per_rank),
        _seconds(planned),
        "yes" if planned.stock_resumes else "no",
    )


def _batch(planned: PlannedLayout) -> str:
    """Return micro batch / global batch; a question mark for an unknown one."""
    return f"{planned.micro_batch_size} / {planned.global_batch_size or '?'}"


def _split(planned: PlannedLayout) -> str:
    """Return the number of layers per pipeline rank: `4`, or `1 to 4` if they differ."""
    counts = planned.layers_per_stage
    if len(set(counts)) <= 1:
        return str(counts[0]) if counts else ""
    return f"{min(counts)} to {max(counts)}"


def _fit(planned: PlannedLayout) -> str | Painted:
    if planned.fits is None:
        return Painted("?", REMARKABLE)
    return Painted("yes", GOOD) if planned.fits else Painted("no", BAD)


def _seconds(planned: PlannedLayout) -> str:
    return (
        format_bytes(planned.read_in_all)
        if planned.seconds is None
        else f"{format_bytes(planned.read_in_all)}, {planned.seconds:,.0f} s"
    )
