"""`mcore-ckpt verify`: check that a checkpoint is complete and intact, and masters match weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mcore_ckpt_ext.cli.folding import group_by, strip_numbers
from mcore_ckpt_ext.cli.join import add_join
from mcore_ckpt_ext.cli.options import add_facts, add_weights, options_of
from mcore_ckpt_ext.cli.output import BAD, GOOD, REMARKABLE, Painted, heading, line, table
from mcore_ckpt_ext.cli.page import check_page_file, verification_page
from mcore_ckpt_ext.cli.progress import progress_of
from mcore_ckpt_ext.cli.report import report
from mcore_ckpt_ext.cli.sizes import parse_count
from mcore_ckpt_ext.defaults import DEFAULT_WORKERS
from mcore_ckpt_ext.errors import CheckpointError, quantity
from mcore_ckpt_ext.storage.paths import as_path

if TYPE_CHECKING:
    from mcore_ckpt_ext.communicator import Communicator
    from mcore_ckpt_ext.operations.check_results import VerificationResult
    from mcore_ckpt_ext.operations.findings import Check, Finding, Verification


_SHOWN = 4
_UNREADABLE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="run folder (newest iteration), iteration, or a folder of Hugging Face, PEFT, ColossalAI or canonical",
    )
    parser.add_argument("--quick", action="store_true", help="check metadata only, without reading tensors")
    parser.add_argument("--all", action="store_true", help="list every finding, also many of one kind")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--workers", type=parse_count, default=DEFAULT_WORKERS, metavar="N", help="number of threads")
    parser.add_argument("--record", metavar="FILE", help="if sound, write a manifest: SHA-256 of all files and tensors")
    parser.add_argument("--against", metavar="FILE", help="compare with such a manifest, or with a list of sha256sum")
    parser.add_argument(
        "--tensors-only", action="store_true", help="compare tensors with it, not files, as after a conversion"
    )
    parser.add_argument(
        "--prometheus", metavar="FILE", type=as_path, help="also write the result as metrics for node_exporter"
    )
    parser.add_argument("--html", metavar="FILE", type=as_path, help="also write a self-contained page")
    add_join(parser)
    add_weights(parser, "an optimizer-only checkpoint")
    add_facts(parser)


def run(arguments: argparse.Namespace) -> int:
    """Verify, and report the result."""
    from mcore_ckpt_ext.cli.processes import command_team
    from mcore_ckpt_ext.operations.check_results import verification_result

    if arguments.html is not None:
        check_page_file(arguments.html)
    with command_team(join=arguments.join) as team:
        is_measured = arguments.prometheus is not None and team.rank == 0
        verification = _verify_and_measure(arguments, team) if is_measured else _verify(arguments, team)
        exit_code = _exit_code(verification)
        if team.rank == 0:
            report(
                arguments,
                "verify",
                verification_result(verification),
                page=lambda result: verification_page(result, _verdict(verification)),
                show=lambda _: _show(verification, show_all=arguments.all),
                exit_code=exit_code,
            )
    return exit_code


def _verify(arguments: argparse.Namespace, team: Communicator) -> Verification:
    from mcore_ckpt_ext.operations.options import VerificationOptions
    from mcore_ckpt_ext.operations.verification import verify

    options = options_of(VerificationOptions, arguments)
    return verify(arguments.path, options, progress=progress_of(team), team=team)


def _verify_and_measure(arguments: argparse.Namespace, team: Communicator) -> Verification:
    """Verify, and write metrics, even if the checkpoint cannot be verified.

    Raises:
        CheckpointError: the checkpoint cannot be verified, or the metrics cannot be written.
    """
    from mcore_ckpt_ext.cli import prometheus
    from mcore_ckpt_ext.operations.check_results import verification_result

    prometheus.check_metrics_file(arguments.prometheus)
    begin = time.monotonic()

    def write(exit_code: int, result: VerificationResult | None = None) -> None:
        seconds = time.monotonic() - begin
        disk = None if result is None else prometheus.disk_of(as_path(result.path))
        text = prometheus.metrics(
            arguments.path, exit_code, seconds, result, disk, quick=arguments.quick, file=arguments.prometheus.name
        )
        prometheus.write_metrics(arguments.prometheus, text)

    try:
        verification = _verify(arguments, team)
    except CheckpointError:
        write(_UNREADABLE)
        raise
    write(_exit_code(verification), verification_result(verification))
    return verification


def _exit_code(verification: Verification) -> int:
    return 0 if verification.sound else 1


def _show(verification: Verification, *, show_all: bool) -> None:
    line(verification.path)
    failed = {finding.check for finding in verification.findings if finding.severity == "error"}
    table(
        _row(name, name in failed, verification.checks)
        for name in dict.fromkeys(check.name for check in verification.checks)
    )
    if verification.findings:
        heading("findings")
        for findings in group_by(verification.findings, _kind_of_finding):
            listed = findings if show_all or len(findings) <= _SHOWN + 1 else findings[:_SHOWN]
            for finding in listed:
                line(f"  {finding.severity}, {finding.check}: {finding.where}: {finding.what}")
            if len(listed) < len(findings):
                line(f"  and {len(findings) - len(listed):,} more like the last; --all lists them")
    line()
    if verification.recorded:
        line(f"recorded in {verification.recorded}")
    line(Painted(_verdict(verification), GOOD if verification.sound else BAD))


def _verdict(verification: Verification) -> str:
    """Return the last line, which names keys that were not looked at."""
    if not verification.sound:
        errors = sum(finding.severity == "error" for finding in verification.findings)
        return f"NOT SOUND: {quantity(errors, 'error')}"
    depth = ": metadata only, data not read" if verification.quick else ""
    rest = verification.account.sentence if verification.account else ""
    return "; ".join(filter(None, (f"sound{depth}", rest)))


def _kind_of_finding(finding: Finding) -> tuple[str, str, str]:
    """Return the key by which findings are grouped that differ only in place and numbers."""
    return finding.severity, finding.check, strip_numbers(finding.what).partition(";")[0]


def _row(name: str, failed: bool, checks: Iterable[Check]) -> tuple[str, Painted, str]:
    """Return the line of a check, which may have been done for a part only."""
    of_name = [check for check in checks if check.name == name]
    is_done = any(check.done for check in of_name)
    extents = (f"{'' if check.done or not is_done else 'not done: '}{check.extent}" for check in of_name)
    return name, _state(failed, is_done), "; ".join(extents)


def _state(failed: bool, done: bool) -> Painted:
    return Painted("FAILED", BAD) if failed else Painted("ok", GOOD) if done else Painted("not done", REMARKABLE)
