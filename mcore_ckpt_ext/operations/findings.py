"""The results of a verification, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning"]

COMPLETE = "complete"
COVERED = "every element once"
MANIFEST = "integrity.json"
FILE_DIGESTS = "file digests"
CHECKSUMS = "checksums"
PROOF = "proof"
DIGESTS = "digests"
COPIES = "copies"
VALUES = "values"
KNOWN = "every key known"
DTYPES = "dtypes"
SCALES = "scales"
RECORDED_FILES = "recorded files"
RECORDED_TENSORS = "recorded tensors"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (`error`) or remarkable (`warning`): which check saw it, where, and what.

    `file` and `offset`: the file, as the checkpoint names it or by its path, and the byte in it, where it is of one
    place.
    """

    severity: Severity
    check: str
    where: str
    what: str
    file: str | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check that was made, and on how much; `done` is False where it could not be, for the reason in `extent`."""

    name: str
    extent: str
    done: bool = True


@dataclass(frozen=True)
class Verification:
    """The result: sound means that no finding is an error.

    Attributes:
        path: the checkpoint's folder.
        quick: whether metadata alone was checked.
        checks: that were made, or could not be.
        findings: in the order of the checks.
        recorded: the manifest that was written; None where none was.
        iteration: of a job; None where the checkpoint cannot be opened, or is a model to start from.
    """

    path: str
    quick: bool
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    recorded: str | None = None
    iteration: int | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.severity == "error" for finding in self.findings)


@dataclass
class Results:
    """The findings and checks of a verification so far."""

    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def extend(self, other: Results) -> None:
        """Append the findings and checks of other steps."""
        self.findings += other.findings
        self.checks += other.checks


def error(check: str, where: str, what: str, file: str | None = None, offset: int | None = None) -> Finding:
    """Something is wrong."""
    return Finding("error", check, where, what, file, offset)


def warning(check: str, where: str, what: str, file: str | None = None, offset: int | None = None) -> Finding:
    """Something is remarkable."""
    return Finding("warning", check, where, what, file, offset)
