"""The results of a verification, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mcore_ckpt_ext.formats.accounts import Account
from mcore_ckpt_ext.operations.options import VerificationOptions
from mcore_ckpt_ext.operations.short_repr import ShortRepr

Severity = Literal["error", "warning"]

COMPLETE = "complete"
COVERED = "every element once"
MANIFEST = "integrity manifest"
FILE_DIGESTS = "file digests"
CHECKSUMS = "checksums"
MASTERS = "masters"
DIGESTS = "optimizer digests"
COPIES = "copies"
VALUES = "values"
KNOWN = "every key known"
DTYPES = "dtypes"
SCALES = "scales"
RECORDED_FILES = "recorded files"
RECORDED_TENSORS = "recorded tensors"
IDS = {
    name: name.replace(" ", "-")
    for name in (
        COMPLETE,
        FILE_DIGESTS,
        COVERED,
        KNOWN,
        MANIFEST,
        CHECKSUMS,
        DIGESTS,
        MASTERS,
        COPIES,
        VALUES,
        DTYPES,
        SCALES,
        RECORDED_FILES,
        RECORDED_TENSORS,
    )
}
"""The id of each check by its name in text, in the order of reports; ids are public and are never reused."""
OF_CONTENT = {MANIFEST, CHECKSUMS, DIGESTS, MASTERS, COPIES, VALUES}
"""Checks that read the content of files, which `--quick` leaves out."""
OPTIONAL = {FILE_DIGESTS, DTYPES, SCALES, RECORDED_FILES, RECORDED_TENSORS}
"""Checks that do not apply to every checkpoint, so that their absence says nothing about an earlier failure."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem (`error`) or remarkable fact (`warning`), with its check, place and description.

    `file` and `offset`: the file, as the checkpoint names it or by its path, and the byte in it; None if it has no
    single place.
    """

    severity: Severity
    check: str
    where: str
    what: str
    file: str | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its extent; `done` is False if it was not possible, with the reason in `extent`."""

    name: str
    extent: str
    done: bool = True


@dataclass(frozen=True, repr=False)
class Verification(ShortRepr):
    """The result of a verification; sound means that no finding is an error.

    Attributes:
        path: the checkpoint's folder.
        options: the options of the verification.
        checks: the checks that were made, or were not possible.
        findings: the findings, in the order of the checks.
        recorded: the manifest that was written; None if none was.
        iteration: the iteration; None if the checkpoint cannot be opened, or is a model to start from.
        account: what was done with each stored key; None if the keys cannot be listed.
    """

    path: str
    options: VerificationOptions
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    recorded: str | None = None
    iteration: int | None = None
    account: Account | None = None

    @property
    def quick(self) -> bool:
        """True if only metadata was checked."""
        return self.options.quick

    @property
    def sound(self) -> bool:
        """True if no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)


@dataclass
class Results:
    """The findings and checks of a verification so far.

    `links`: the recorded digests of the checksums in each file, as far as the folder has any.
    """

    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    account: Account | None = None
    links: Mapping[str, str] = field(default_factory=dict)

    def extend(self, other: Results) -> None:
        """Append the findings and checks of other steps."""
        self.findings += other.findings
        self.checks += other.checks


def error(check: str, where: str, message: str, file: str | None = None, offset: int | None = None) -> Finding:
    """Make a finding about a problem."""
    return Finding("error", check, where, message, file, offset)


def warning(check: str, where: str, message: str, file: str | None = None, offset: int | None = None) -> Finding:
    """Make a finding about a remarkable fact."""
    return Finding("warning", check, where, message, file, offset)
