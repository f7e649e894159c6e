"""The result of a self-test: one row for each job, and whether all passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from mcore_ckpt_ext.selftest.jobs import Job, JobResult

Outcome = Literal["passed", "FAILED", "skipped"]

_LOSS_TOLERANCE = 1e-2
"""Relative: another layout adds in another order, in bf16 or fp8. What is compared bit by bit is the state."""


@dataclass(frozen=True)
class Row:
    """One job of the self-test.

    Attributes:
        model: name of the model.
        layout: how it was spread over the ranks.
        format: optimizer format of the checkpoint.
        check: what the job shows.
        outcome: how it ended.
        bits_equal: weights, masters, moments and steps after the load are those at the save; null where nothing was
            loaded.
        elements: number of elements that were compared or saved.
        seconds: duration of the job.
        setup_seconds: until model and optimizer were set up, and the checkpoint loaded.
        losses: of the iterations after the checkpoint.
        expected_losses: those of the uninterrupted run.
        details: what differed, why it was skipped, or what the job reported.
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
        passed: nothing failed, and something was loaded.
        ranks: number of ranks.
        device: name of the device of the first rank.
        versions: of what took part.
        rows: one for each job.
        folder: what the ranks wrote, where it was kept.
    """

    passed: bool
    ranks: int
    device: str
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    folder: str | None


def row(job: Job, result: JobResult | None, saved: JobResult | None, failure: str) -> Row:
    """Judge one job.

    Args:
        job: what was run.
        result: what came of it; None where it did not end.
        saved: the result of the job whose checkpoint it resumed.
        failure: why it did not end.
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


def passed(rows: Iterable[Row]) -> bool:
    """Nothing failed, and at least one checkpoint was resumed."""
    found = list(rows)
    return all(one.outcome != "FAILED" for one in found) and any(one.bits_equal for one in found)


def _what_is_wrong(
    job: Job, result: JobResult | None, losses: tuple[float, ...], expected: tuple[float, ...], failure: str
) -> tuple[str, ...]:
    if result is None:
        return (failure,)
    found = list(result.differences)
    if job.expects and not any(job.expects in line for line in result.messages):
        found.append(f'this package was not active: it did not report "{job.expects}"; see why: mcore-ckpt doctor')
    if job.loads is not None and not _are_close(losses, expected):
        texts = [", ".join(f"{loss:.4f}" for loss in values) for values in (losses, expected)]
        found.append(f"losses {texts[0]}, without an interruption {texts[1]}")
    return tuple(found)


def _are_close(losses: tuple[float, ...], expected: tuple[float, ...]) -> bool:
    """Compare losses; NaN is close to nothing."""
    pairs = zip(losses, expected, strict=False)
    return len(losses) == len(expected) > 0 and all(
        abs(one - other) <= _LOSS_TOLERANCE * abs(other) for one, other in pairs
    )
