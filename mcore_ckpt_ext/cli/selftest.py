"""`mcore-ckpt selftest`: check that checkpoints resume with this machine's Megatron and GPUs."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt_ext.cli.json_output import check_result_file, print_result, write_result
from mcore_ckpt_ext.cli.output import BAD, GOOD, REMARKABLE, Painted, line, message, table
from mcore_ckpt_ext.cli.ranks import place_among_ranks, variables_of_srun
from mcore_ckpt_ext.cli.sizes import parse_count
from mcore_ckpt_ext.errors import UsageError, quantity
from mcore_ckpt_ext.selftest.report import Outcome, Report, Row, have_passed
from mcore_ckpt_ext.storage.paths import local_path

if TYPE_CHECKING:
    from mcore_ckpt_ext.selftest.jobs import Machine, Order
    from mcore_ckpt_ext.selftest.launcher import Ended
    from mcore_ckpt_ext.selftest.run import Start

_STYLES: dict[Outcome, str] = {"passed": GOOD, "FAILED": BAD, "skipped": REMARKABLE}
_HEADER = ("model", "layout", "format", "check", "bits equal", "seconds", "")
_STDOUT = "-"
# Time without progress. The first job imports all modules, which may be on a slow file system.
_PATIENCE_SECONDS = 240


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--nproc", type=parse_count, metavar="N", help="number of ranks on this node (default: one for each GPU)"
    )
    parser.add_argument(
        "--folder", metavar="FOLDER", type=local_path, help="file system to test (default: temporary files)"
    )
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const=_STDOUT, help="write the result as JSON (default: print it)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the test, and report the results."""
    from mcore_ckpt_ext.cli.processes import connect
    from mcore_ckpt_ext.cli.selftest_ranks import SelftestRanks, require_shared_folder
    from mcore_ckpt_ext.selftest.machine import this_machine

    _check_paths(arguments)
    if arguments.json not in (None, _STDOUT):
        Path(arguments.json).unlink(missing_ok=True)  # not to be mistaken for the result of a test that ends early
    place = place_among_ranks(os.environ)
    if place is None:
        return _test(this_machine(arguments.nproc), arguments, start_ranks)
    if arguments.nproc not in (None, place.on_node):
        raise UsageError(
            "torchrun or srun has started the ranks",
            found=f"{place.on_node} on this node, {place.total} in all",
            expected=f"--nproc {arguments.nproc} on this node",
            hint="leave --nproc out",
        )
    require_shared_folder(place, arguments.folder)
    machine = replace(this_machine(place.on_node), ranks=place.total)
    os.environ.update(variables_of_srun(os.environ))
    with connect(place.rank, place.total) as processes:
        ranks = SelftestRanks(place, processes, _PATIENCE_SECONDS)
        return ranks.lead(partial(_test, machine, arguments)) if place.rank == 0 else ranks.follow()


def _test(machine: Machine, arguments: argparse.Namespace, start: Start) -> int:
    from mcore_ckpt_ext.selftest import run as running
    from mcore_ckpt_ext.selftest.machine import device_name, versions
    from mcore_ckpt_ext.selftest.plan import plan

    jobs = plan(machine)
    ranks = quantity(machine.ranks, "rank")
    message(f"{quantity(sum(not job.skipped for job in jobs), 'job')} on {ranks}; about three minutes")
    rows, folder = running.run(jobs, start, arguments.folder)
    report = Report(
        have_passed(rows), machine.ranks, device_name(), versions(), rows, None if folder is None else str(folder)
    )
    code = 0 if report.passed else 1
    if arguments.json == _STDOUT:
        print_result("selftest", report, code)
        return code
    _show(report)
    if arguments.json is not None:
        write_result(Path(arguments.json), "selftest", report, code)
    return code


def _check_paths(arguments: argparse.Namespace) -> None:
    """Check, before minutes of training, that the folders to write to exist.

    Raises:
        UsageError: one does not exist, or the result would overwrite another file.
    """
    if arguments.json not in (None, _STDOUT):
        check_result_file(local_path(arguments.json), "selftest")
    if arguments.folder is not None and not arguments.folder.is_dir():
        raise UsageError(
            "--folder names no folder", where=str(arguments.folder), hint="create it, or choose another folder"
        )


def start_ranks(order: Order) -> Ended:
    """Start the ranks of this node, which run one job after the other."""
    from mcore_ckpt_ext.selftest.jobs import read_results
    from mcore_ckpt_ext.selftest.launcher import all_on_this_node, start

    def progress() -> int:
        return len(read_results(order.results))

    ranks = all_on_this_node(order.jobs[0].layout.world)
    return start(ranks, order.write(), progress=progress, patience=_PATIENCE_SECONDS)


def _show(report: Report) -> None:
    table(_cells(report.rows), header=_HEADER, right=[5])
    line()
    line(
        f"{report.ranks} x {report.device}; {', '.join(f'{name} {number}' for name, number in report.versions.items())}"
    )
    if report.folder is not None:
        line(f"logs and checkpoints: {report.folder}")
    failed = [row for row in report.rows if row.outcome == "FAILED"]
    for row in failed:
        text = f"{row.model}, {row.layout}, {row.format}, {row.check}: {'; '.join(row.details)}"
        for part in text.splitlines():
            line(Painted(part, BAD))
    line(Painted("PASS", GOOD) if report.passed else Painted(f"FAILED: {len(failed)} of {len(report.rows)}", BAD))


def _cells(rows: tuple[Row, ...]) -> list[tuple[object, ...]]:
    bits = {None: "", True: "yes", False: Painted("NO", BAD)}
    return [
        (
            row.model,
            row.layout,
            row.format,
            row.check,
            bits[row.bits_equal],
            f"{row.seconds:.1f}" if row.seconds else "",
            Painted(f"skipped: {row.details[0]}" if row.outcome == "skipped" else row.outcome, _STYLES[row.outcome]),
        )
        for row in rows
    ]
