"""`mcore-ckpt plan --rehearse`: simulate a resume under one layout, up to its first write."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcore_ckpt_ext.cli.join import add_join
from mcore_ckpt_ext.cli.output import BAD, GOOD, Painted, heading, line, table
from mcore_ckpt_ext.cli.page import rehearsal_page
from mcore_ckpt_ext.cli.report import report
from mcore_ckpt_ext.cli.shown_plan import shown_rehearsal
from mcore_ckpt_ext.errors import UsageError, format_bytes
from mcore_ckpt_ext.job.assignments import parse_assignments

if TYPE_CHECKING:
    from mcore_ckpt_ext.operations.layout_plan import PlannedLayout
    from mcore_ckpt_ext.rehearsal.result import Rehearsal

_WILL_SUCCEED = "this resume will succeed"
# Options that only concern the list of layouts, with their defaults, by their attribute in argparse's namespace.
_OF_LIST: dict[str, object] = {"gpu_memory": None, "pin": [], "recompute": None, "read_rate": None, "all": False}


def add_rehearsal(parser: argparse.ArgumentParser) -> None:
    """Add the options of a rehearsal."""
    group = parser.add_argument_group("rehearsal: simulate the resume of all ranks, up to the first write")
    group.add_argument(
        "--rehearse",
        action="append",
        metavar="DIM=N ...",
        help="layout to rehearse, such as tp=8 pp=8 vpp=2 ep=4 etp=1 cp=2; omitted sizes are 1, etp is tp",
    )
    group.add_argument("--full", action="store_true", help="compare all masters with their weights, not only samples")
    group.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="NAME=VALUE ...",
        help="argument other than the layout that will differ from the job that wrote the checkpoint",
    )
    add_join(group)


def check_rehearsal(arguments: argparse.Namespace) -> None:
    """Check that the options are compatible with each other.

    Raises:
        UsageError: an option requires `--rehearse`, or has no effect with it.
    """
    if arguments.rehearse is None:
        given = [f"--{name}" for name in ("full", "change", "join") if getattr(arguments, name)]
        if given:
            raise UsageError("this option requires --rehearse", found=given[0], expected="--rehearse")
        return
    facts = [name for name in vars(arguments) if name.startswith("fact_")]
    defaults = {**_OF_LIST, **dict.fromkeys(facts)}
    given = [name for name, default in defaults.items() if getattr(arguments, name) != default]
    if given:
        flag = f"--{given[0].removeprefix('fact_').replace('_', '-')}"
        raise UsageError("this option has no effect on a rehearsal", found=flag, hint="leave it out")


def run_rehearsal(arguments: argparse.Namespace) -> int:
    """Rehearse a resume, and return 1 if it would be refused."""
    from mcore_ckpt_ext.cli.processes import command_team
    from mcore_ckpt_ext.operations.options import RehearsalOptions
    from mcore_ckpt_ext.rehearsal.rehearse import rehearse
    from mcore_ckpt_ext.rehearsal.target import sizes_in

    sizes = sizes_in(" ".join(arguments.rehearse))
    options = RehearsalOptions(
        megatron_version=arguments.megatron_version,
        full=arguments.full,
        arguments=parse_assignments(arguments.argument),
        changes=parse_assignments(arguments.change),
    )
    with command_team(join=arguments.join) as team:
        rehearsal = rehearse(arguments.path, arguments.gpus, sizes, options, team=team)
        exit_code = 0 if rehearsal.will_succeed else 1
        if team.rank == 0:
            report(arguments, "plan", rehearsal, page=rehearsal_page, show=_show, exit_code=exit_code)
    return exit_code


def _show(rehearsal: Rehearsal) -> None:
    shown = shown_rehearsal(rehearsal)
    line(rehearsal.path)
    table(shown.facts)
    show_sentences(shown.remarks)
    if rehearsal.refusal is not None:
        heading(f"this resume will be refused{'; the job prints' if rehearsal.is_verbatim else ''}")
        for text in rehearsal.refusal.splitlines():
            line(Painted(text, BAD))
        return
    heading("checked")
    table(shown.checked)
    heading("taken for granted")
    show_sentences(rehearsal.given)
    if rehearsal.flags:
        show_flags("flags", rehearsal)
    line()
    summary = f"iteration {rehearsal.iteration} as {rehearsal.new_layout}, {format_bytes(rehearsal.bytes_read)} to read"
    line(Painted(f"{_WILL_SUCCEED}: {summary}", GOOD))


def show_flags(title: str, layout: Rehearsal | PlannedLayout) -> None:
    """Show the flags of a layout, those that must go, and what it changes for the user."""
    heading(title)
    line(f"  {layout.flags}")
    if layout.removed_flags:
        line(f"  leave out, if your command has them: {', '.join(layout.removed_flags)}")
    for note in layout.notes:
        line(f"  note: {note}")


def show_sentences(sentences: Sequence[str]) -> None:
    """Show sentences on lines of their own."""
    for sentence in sentences:
        line(f"  {sentence}")
