"""`mcore-ckpt plan`: list layouts for a number of GPUs that can resume a checkpoint, or rehearse one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcore_ckpt_ext.cli.assignments import ARGUMENT_HELP
from mcore_ckpt_ext.cli.options import add_facts, options_of
from mcore_ckpt_ext.cli.output import BAD, GOOD, REMARKABLE, Painted, heading, line, table
from mcore_ckpt_ext.cli.page import check_page_file, plan_page
from mcore_ckpt_ext.cli.rehearsal import add_rehearsal, check_rehearsal, run_rehearsal, show_flags, show_sentences
from mcore_ckpt_ext.cli.report import report
from mcore_ckpt_ext.cli.shown_plan import FITS, HEADER, ShownPlan, shown_plan
from mcore_ckpt_ext.cli.sizes import parse_count, parse_size
from mcore_ckpt_ext.cli.terminal import terminal_width
from mcore_ckpt_ext.errors import format_bytes, quantity
from mcore_ckpt_ext.job.dimensions import PINS
from mcore_ckpt_ext.layout_choice.options import Recomputation, parse_sizes
from mcore_ckpt_ext.storage.paths import as_path

if TYPE_CHECKING:
    from mcore_ckpt_ext.operations.layout_plan import LayoutPlan

# The width of the whole table, and the number of columns on a narrower terminal.
_WIDTH = 120
_NARROW = 6
_STYLES = {"yes": GOOD, "no": BAD, "?": REMARKABLE}


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
        "--pin", action="append", default=[], metavar="DIM=N ...", help=f"fix dimensions: {', '.join(PINS)}"
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
        "--data-samples",
        type=parse_count,
        metavar="N",
        help="samples of the training data set, which no checkpoint records, to count those that a random sampler "
        "reads again or never",
    )
    parser.add_argument("--argument", action="append", default=[], metavar="NAME=VALUE ...", help=ARGUMENT_HELP)
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
        check_page_file(arguments.html)
    if arguments.rehearse is not None:
        return run_rehearsal(arguments)
    from mcore_ckpt_ext.job.assignments import parse_assignments
    from mcore_ckpt_ext.operations.layout_plan import plan
    from mcore_ckpt_ext.operations.options import PlanOptions

    options = options_of(
        PlanOptions,
        arguments,
        pins=parse_sizes(" ".join(arguments.pin)),
        recomputation=arguments.recompute,
        most=None if arguments.all else PlanOptions.most,
        arguments=parse_assignments(arguments.argument),
    )
    layout_plan = plan(arguments.path, arguments.gpus, options)
    return report(arguments, "plan", layout_plan, page=plan_page, show=_show, exit_code=0 if layout_plan.fits else 1)


def _show(plan: LayoutPlan) -> None:
    shown = shown_plan(plan)
    line(plan.path)
    table(shown.facts)
    show_sentences(shown.remarks)
    if plan.layouts:
        _show_layouts(plan, shown)
    else:
        line()
        line(Painted(f"no layout of {quantity(plan.gpus, 'GPU')} is accepted", BAD))
    if not plan.fits:
        _show_what_excludes(plan)
    if plan.fewer:
        heading(shown.fewer_title)
        table(shown.fewer, header=shown.fewer_header, right=(0, 2, 4))


def _show_layouts(plan: LayoutPlan, shown: ShownPlan) -> None:
    listed = len(plan.layouts)
    rest = f" of {plan.accepted}" if listed < plan.accepted else ""
    heading(f"layouts that Megatron accepts: {listed}{rest}, best first")
    # A narrow terminal omits the last columns, which are the same for most layouts; --json has them.
    shown_columns = len(HEADER) if (terminal_width() or _WIDTH) >= _WIDTH else _NARROW
    table((_paint(row)[:shown_columns] for row in shown.rows), header=HEADER[:shown_columns], right=(2, 4, 6))
    show_sentences(shown.sentences)
    best = plan.layouts[0]
    show_flags(f"flags for {best.layout}", best)
    show_sentences(shown.best)


def _paint(row: Sequence[str]) -> list[str | Painted]:
    return [*row[:FITS], Painted(row[FITS], _STYLES[row[FITS]]), *row[FITS + 1 :]]


def _show_what_excludes(plan: LayoutPlan) -> None:
    if plan.least_memory is not None:
        line()
        least = f"{format_bytes(plan.least_memory)} ({plan.least_layout})"
        line(Painted(f"no layout fits: the smallest needs {least}", BAD))
        line("hint: --recompute full keeps fewer activations; --all lists every layout")
    elif plan.nearest:
        heading("why the nearest layouts are excluded")
        table(plan.nearest)
