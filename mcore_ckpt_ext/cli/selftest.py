"""`mcore-ckpt selftest`: whether checkpoints resume with the Megatron and the GPUs of this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt_ext.cli.json_output import print_result, write_result
from mcore_ckpt_ext.cli.output import BAD, GOOD, REMARKABLE, Painted, line, message, table
from mcore_ckpt_ext.cli.sizes import parse_count
from mcore_ckpt_ext.selftest.report import Outcome, Report, Row, passed

if TYPE_CHECKING:
    from mcore_ckpt_ext.selftest.jobs import Order
    from mcore_ckpt_ext.selftest.launcher import Ended

_STYLES: dict[Outcome, str] = {"passed": GOOD, "FAILED": BAD, "skipped": REMARKABLE}
_HEADER = ("model", "layout", "format", "check", "bits equal", "seconds", "")
_STDOUT = "-"
_PATIENCE_SECONDS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--nproc", type=parse_count, metavar="N", help="number of ranks (default: one for each GPU)")
    parser.add_argument("--folder", metavar="FOLDER", type=Path, help="file system to test (default: temporary files)")
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const=_STDOUT, help="write the result as JSON (default: print it)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Test, and report it."""
    from mcore_ckpt_ext.selftest import run as running
    from mcore_ckpt_ext.selftest.machine import device_name, this_machine, versions
    from mcore_ckpt_ext.selftest.plan import plan

    machine = this_machine(arguments.nproc)
    jobs = plan(machine)
    message(f"{sum(not job.skipped for job in jobs)} jobs on {machine.ranks} ranks; about three minutes")
    rows, folder = running.run(jobs, start_ranks, arguments.folder)
    report = Report(
        passed(rows), machine.ranks, device_name(), versions(), rows, None if folder is None else str(folder)
    )
    code = 0 if report.passed else 1
    if arguments.json == _STDOUT:
        print_result("selftest", report, code)
        return code
    if arguments.json is not None:
        write_result(Path(arguments.json), "selftest", report, code)
    _show(report)
    return code


def start_ranks(order: Order) -> Ended:
    """Start the ranks of this node, which have to finish a job every two minutes."""
    from mcore_ckpt_ext.selftest.jobs import read_results
    from mcore_ckpt_ext.selftest.launcher import start

    def progress() -> int:
        return len(read_results(order.results))

    return start(order.jobs[0].layout.ranks, order.write(), progress=progress, patience=_PATIENCE_SECONDS)


def _show(report: Report) -> None:
    table(_cells(report.rows), header=_HEADER, right=[5])
    line()
    line(f"{report.ranks} x {report.device}; {', '.join(f'{name} {found}' for name, found in report.versions.items())}")
    if report.folder is not None:
        line(f"logs and checkpoints: {report.folder}")
    failed = [one for one in report.rows if one.outcome == "FAILED"]
    for one in failed:
        line(Painted(f"{one.model}, {one.layout}, {one.format}, {one.check}: {'; '.join(one.details)}", BAD))
    line(Painted("PASS", GOOD) if report.passed else Painted(f"FAILED: {len(failed)} of {len(report.rows)}", BAD))


def _cells(rows: tuple[Row, ...]) -> list[tuple[object, ...]]:
    bits = {None: "", True: "yes", False: Painted("NO", BAD)}
    return [
        (
            one.model,
            one.layout,
            one.format,
            one.check,
            bits[one.bits_equal],
            f"{one.seconds:.1f}" if one.seconds else "",
            Painted(f"skipped: {one.details[0]}" if one.outcome == "skipped" else one.outcome, _STYLES[one.outcome]),
        )
        for one in rows
    ]
