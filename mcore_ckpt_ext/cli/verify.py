"""`mcore-ckpt verify`: whether a checkpoint is complete, undamaged, and proven."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mcore_ckpt_ext.cli.facts import add_facts, add_weights, facts_of
from mcore_ckpt_ext.cli.folding import alike, without_numbers
from mcore_ckpt_ext.cli.json_output import print_result
from mcore_ckpt_ext.cli.output import BAD, GOOD, REMARKABLE, Painted, heading, line, table
from mcore_ckpt_ext.cli.progress import Progress
from mcore_ckpt_ext.cli.sizes import parse_count
from mcore_ckpt_ext.defaults import DEFAULT_WORKERS

if TYPE_CHECKING:
    from mcore_ckpt_ext.operations.findings import Finding, Verification


_SHOWN = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="run folder (newest iteration), iteration, or a folder of Hugging Face, PEFT, ColossalAI or canonical",
    )
    parser.add_argument("--quick", action="store_true", help="check metadata only, without reading tensors")
    parser.add_argument("--all", action="store_true", help="list every finding, also many of one kind")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--workers", type=parse_count, default=DEFAULT_WORKERS, metavar="N", help="number of threads")
    add_weights(parser, "an optimizer-only checkpoint")
    add_facts(parser)


def run(arguments: argparse.Namespace) -> int:
    """Verify, and report what was found."""
    from mcore_ckpt_ext.operations.check_results import verification_result
    from mcore_ckpt_ext.operations.verification import verify

    found = verify(
        arguments.path,
        quick=arguments.quick,
        workers=arguments.workers,
        progress=Progress(),
        facts=facts_of(arguments),
        weights=arguments.weights,
    )
    if arguments.json:
        print_result("verify", verification_result(found), 0 if found.sound else 1)
    else:
        _show(found, show_all=arguments.all)
    return 0 if found.sound else 1


def _show(found: Verification, *, show_all: bool) -> None:
    line(found.path)
    failed = {finding.check for finding in found.findings if finding.severity == "error"}
    table((check.name, _state(check.name in failed, check.done), check.extent) for check in found.checks)
    if found.findings:
        heading("findings")
        for findings in alike(found.findings, _kind_of_finding):
            shown = findings if show_all or len(findings) <= _SHOWN + 1 else findings[:_SHOWN]
            for finding in shown:
                line(f"  {finding.severity}, {finding.check}: {finding.where}: {finding.what}")
            if len(shown) < len(findings):
                line(f"  and {len(findings) - len(shown):,} more like the last; --all lists them")
    errors = sum(finding.severity == "error" for finding in found.findings)
    line()
    depth = ": metadata only, data not read" if found.quick else ""
    if found.sound:
        line(Painted(f"sound{depth}", GOOD))
    else:
        line(Painted(f"NOT SOUND: {errors} error{'s' if errors > 1 else ''}", BAD))


def _kind_of_finding(finding: Finding) -> tuple[str, str, str]:
    """Return what findings have in common that differ only in the place and in numbers."""
    return finding.severity, finding.check, without_numbers(finding.what).partition(";")[0]


def _state(failed: bool, done: bool) -> Painted:
    return Painted("FAILED", BAD) if failed else Painted("ok", GOOD) if done else Painted("not done", REMARKABLE)
