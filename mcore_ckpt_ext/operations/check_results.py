"""A verification as data for programs: one result for each check, with a stable id, and the problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mcore_ckpt_ext.operations.findings import (
    CHECKSUMS,
    COMPLETE,
    COPIES,
    COVERED,
    DIGESTS,
    DTYPES,
    FILE_DIGESTS,
    KNOWN,
    MANIFEST,
    PROOF,
    RECORDED_FILES,
    RECORDED_TENSORS,
    SCALES,
    VALUES,
    Severity,
    Verification,
)  # fmt: skip

Status = Literal["passed", "failed", "skipped", "not applicable"]

IDS = {
    COMPLETE: "complete", FILE_DIGESTS: "file-digests", COVERED: "every-element-once", KNOWN: "every-key-known",
    MANIFEST: "integrity-manifest", CHECKSUMS: "checksums", DIGESTS: "optimizer-digests", PROOF: "masters",
    COPIES: "copies", VALUES: "values", DTYPES: "dtypes", SCALES: "scales", RECORDED_FILES: "recorded-files",
    RECORDED_TENSORS: "recorded-tensors",
}  # fmt: skip
"""The id of each check by its name in text; ids are public and are never reused."""
_OF_CONTENT = {MANIFEST, CHECKSUMS, DIGESTS, PROOF, COPIES, VALUES}
# Checks that do not apply to every checkpoint, so that their absence says nothing about an earlier failure.
_OPTIONAL = {FILE_DIGESTS, DTYPES, SCALES, RECORDED_FILES, RECORDED_TENSORS}
SCHEMA = 3


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check: `extent` says how much was checked, or why it was not."""

    id: str
    status: Status
    extent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: the check that found it, and its place; `file` and `offset` are None without one."""

    severity: Severity
    check: str
    where: str
    file: str | None
    offset: int | None
    what: str


@dataclass(frozen=True)
class VerificationResult:
    """The result of `verify --json`; `sound` is False if a problem is an error.

    `recorded`: the manifest that was written; None if none was. `iteration`: None if the checkpoint has none, or cannot
    be opened.
    """

    schema: int
    path: str
    iteration: int | None
    quick: bool
    sound: bool
    checks: tuple[CheckResult, ...]
    problems: tuple[Problem, ...]
    recorded: str | None


def verification_result(found: Verification) -> VerificationResult:
    """Return one result for each known check, and each finding with its check's id."""
    problems = (
        Problem(one.severity, IDS[one.check], one.where, one.file, one.offset, one.what) for one in found.findings
    )
    checks = tuple(_checks(found))
    return VerificationResult(
        SCHEMA, found.path, found.iteration, found.quick, found.sound, checks, tuple(problems), found.recorded
    )


def _checks(found: Verification) -> Iterator[CheckResult]:
    failed = {finding.check for finding in found.findings if finding.severity == "error"}
    ended = COVERED not in {check.name for check in found.checks}
    for name, identifier in IDS.items():
        of_check = [check for check in found.checks if check.name == name]
        done = [check for check in of_check if check.done]
        extent = tuple(check.extent for check in (done or of_check))
        if name in failed:
            yield CheckResult(identifier, "failed", extent)
        elif done:
            yield CheckResult(identifier, "passed", extent)
        elif of_check:
            yield CheckResult(identifier, "skipped", extent)
        elif found.quick and name in _OF_CONTENT:
            yield CheckResult(identifier, "skipped", ("--quick checks metadata only",))
        elif ended and name not in _OPTIONAL:
            yield CheckResult(identifier, "skipped", ("an earlier check failed",))
        else:
            yield CheckResult(identifier, "not applicable", ())
