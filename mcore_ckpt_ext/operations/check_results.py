"""A verification as data for programs: one result for each check, with a stable id, and the problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mcore_ckpt_ext.defaults import SCHEMAS
from mcore_ckpt_ext.formats.accounts import Account
from mcore_ckpt_ext.operations.findings import COVERED, IDS, OF_CONTENT, OPTIONAL, Severity, Verification
from mcore_ckpt_ext.operations.options import VerificationOptions

Status = Literal["passed", "failed", "skipped", "not applicable"]
SCHEMA = SCHEMAS["verify"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check.

    Attributes:
        id: the stable name of the check.
        status: its result; `skipped` if it could not be made, `not applicable` if there is nothing to check.
        extent: how much was checked, or why it was not.
    """

    id: str
    status: Status
    extent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of the checkpoint.

    Attributes:
        severity: `error` makes the checkpoint not sound, `warning` does not.
        check: the stable name of the check that found it.
        where: the tensor, file or setting, in words.
        file: the file; None without one.
        offset: the offset in the file, in bytes; None if it is unknown.
        what: what is wrong.
    """

    severity: Severity
    check: str
    where: str
    file: str | None
    offset: int | None
    what: str


@dataclass(frozen=True)
class VerificationResult:
    """The result of `verify --json`.

    Attributes:
        path: the folder of the checkpoint.
        iteration: the iteration; None if the checkpoint has none, or cannot be opened.
        quick: only metadata was checked.
        sound: no problem is an error.
        checks: the result of each check.
        problems: the problems, in the order of the checks.
        recorded: the manifest that was written; None if none was.
        account: what was done with each stored key; None if they cannot be listed.
        options: the options of the verification.
    """

    schema: int
    path: str
    iteration: int | None
    quick: bool
    sound: bool
    checks: tuple[CheckResult, ...]
    problems: tuple[Problem, ...]
    recorded: str | None
    account: Account | None
    options: VerificationOptions


def verification_result(verification: Verification) -> VerificationResult:
    """Return one result for each known check, and each finding with its check's id."""
    problems = (
        Problem(finding.severity, IDS[finding.check], finding.where, finding.file, finding.offset, finding.what)
        for finding in verification.findings
    )
    return VerificationResult(
        SCHEMA,
        verification.path,
        verification.iteration,
        verification.quick,
        verification.sound,
        tuple(_checks(verification)),
        tuple(problems),
        verification.recorded,
        verification.account,
        verification.options,
    )


def _checks(verification: Verification) -> Iterator[CheckResult]:
    failed = {finding.check for finding in verification.findings if finding.severity == "error"}
    ended = COVERED not in {check.name for check in verification.checks}
    for name, identifier in IDS.items():
        of_check = [check for check in verification.checks if check.name == name]
        done = any(check.done for check in of_check)
        extent = tuple(check.extent for check in of_check)
        if name in failed:
            yield CheckResult(identifier, "failed", extent)
        elif done:
            yield CheckResult(identifier, "passed", extent)
        elif of_check:
            yield CheckResult(identifier, "skipped", extent)
        elif verification.quick and name in OF_CONTENT:
            yield CheckResult(identifier, "skipped", ("--quick checks metadata only",))
        elif ended and name not in OPTIONAL:
            yield CheckResult(identifier, "skipped", ("an earlier check failed",))
        else:
            yield CheckResult(identifier, "not applicable", ())
