"""The result of a self-test: one row for each job, and whether all passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from mcore_ckpt_ext.selftest.jobs import Job, JobResult

Outcome = Literal["passed", "FAILED", "skipped"]

_LOSS_TOLERANCE = 1e-2
"""Relative tolerance, because other layouts sum in another order, in bf16 or fp8. States are compared bit by bit."""


@dataclass(frozen=True)
class Row:
    """The result of one job of the self-test.

    Attributes:
        model: name of the model.
        layout: its parallel layout.
        format: optimizer format of the checkpoint.
        check: what the job tests.
        outcome: how it ended.
        bits_equal: whether weights, masters, moments and steps after the load equal those at the save; null if nothing
            was loaded.
        elements: number of elements that were compared or saved.
        seconds: duration of the job.
        setup_seconds: duration of setting up model and optimizer and loading the checkpoint.
        losses: losses of the iterations after the checkpoint.
        expected_losses: losses of the uninterrupted run.
        details: differences, why it was skipped, or the messages of the job.
    """

    model: str
    layout: str
    format: str
    check: str
    outcome: Outcome
    bits_equal: bool | None
    elements: int
    seconds: float
    setup_seconds: float
    losses: tuple[float, ...]
    expected_losses: tuple[float, ...]
    details: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The whole result.

    Attributes:
        passed: whether no job failed, and a checkpoint was loaded.
        ranks: number of ranks.
        device: name of the device of the first rank.
        versions: versions of packages and drivers that affect the test.
        rows: one for each job.
        folder: the folder with the output of the ranks, if it was kept.
    """

    passed: bool
    ranks: int
    device: str
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    folder: str | None


def row(job: Job, result: JobResult | None, saved: JobResult | None, failure: str) -> Row:
    """Evaluate the result of one job.

    Args:
        job: the job.
        result: its result; None if it did not finish.
        saved: the result of the job whose checkpoint it resumed.
        failure: why it did not finish.
    """
    losses = tuple(result.losses.values()) if result else ()
    expected = tuple(saved.losses.values()) if saved else ()
    wrong = _what_is_wrong(job, result, losses, expected, failure)
    outcome: Outcome = "skipped" if job.skipped else "FAILED" if wrong else "passed"
    bits = None if result is None or job.loads is None else not result.differences
    reported = tuple(result.messages) if result else ()
    return Row(
        model=job.model,
        layout=str(job.layout),
        format=job.format,
        check=job.check,
        outcome=outcome,
        bits_equal=bits,
        elements=result.elements if result else 0,
        seconds=result.seconds if result else 0.0,
        setup_seconds=result.setup_seconds if result else 0.0,
        losses=losses,
        expected_losses=expected,
        details=(job.skipped,) if job.skipped else wrong or reported,
    )


def have_passed(rows: Iterable[Row]) -> bool:
    """Return whether no job failed, and at least one checkpoint was resumed."""
    all_rows = list(rows)
    return all(row.outcome != "FAILED" for row in all_rows) and any(row.bits_equal for row in all_rows)


def _what_is_wrong(
    job: Job, result: JobResult | None, losses: tuple[float, ...], expected: tuple[float, ...], failure: str
) -> tuple[str, ...]:
    if result is None:
        return (failure,)
    problems = list(result.differences)
    if job.expects and not any(job.expects in line for line in result.messages):
        problems.append(f'this package was not active: it did not report "{job.expects}"; see why: mcore-ckpt doctor')
    if job.loads is not None and not _are_close(losses, expected):
        texts = [", ".join(f"{loss:.4f}" for loss in values) for values in (losses, expected)]
        problems.append(f"losses {texts[0]}, without an interruption {texts[1]}")
    return tuple(problems)


def _are_close(losses: tuple[float, ...], expected: tuple[float, ...]) -> bool:
    """Compare losses; NaN is not close to anything."""
    pairs = zip(losses, expected, strict=False)
    return len(losses) == len(expected) > 0 and all(
        abs(loss - other) <= _LOSS_TOLERANCE * abs(other) for loss, other in pairs
    )
