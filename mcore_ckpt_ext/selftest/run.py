"""Runs the jobs of the self-test: starts ranks, restarts them after a failure, makes the report."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mcore_ckpt_ext.selftest.jobs import Job, JobResult, Order, read_results
from mcore_ckpt_ext.selftest.launcher import Ended, log_of
from mcore_ckpt_ext.selftest.plan import EIGHT_RANKS
from mcore_ckpt_ext.selftest.report import Row, have_passed, row
from mcore_ckpt_ext.selftest.shipped import unpack

Start = Callable[[Order], Ended]
_PREFIX = "mcore-ckpt-selftest-"
_MOST_LINES = 3


def run(jobs: Sequence[Job], start: Start, parent: Path | None = None) -> tuple[tuple[Row, ...], Path | None]:
    """Run jobs in a new folder.

    Args:
        jobs: each follows the job whose checkpoint it resumes.
        start: starts the ranks with an order, and waits for them.
        parent: where the folder is created; by default, the folder for temporary files.

    Returns:
        A row for each job, and the folder, which is kept if a job failed.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    kept = False
    try:
        rows = tuple(_rows(jobs, folder, _run_all(jobs, folder, start)))
        kept = not have_passed(rows)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    return rows, folder if kept else None


def _run_all(jobs: Sequence[Job], folder: Path, start: Start) -> dict[str, str]:
    """Run jobs until each has finished or failed, and return the failures by name of the job."""
    failures: dict[str, str] = {}
    if any(job.loads == EIGHT_RANKS for job in jobs):
        unpack(Order(folder, ()))
    while remaining := [job for job in jobs if _is_to_run(job, failures, read_results(Order(folder, ()).results))]:
        order = Order(folder, tuple(remaining))
        order.write()
        ended = start(order)
        done = read_results(order.results)
        failed = next((job for job in remaining if job.name not in done), None)
        if failed is not None:
            failures[failed.name] = _reason(order, failed, ended)
    return failures


def _is_to_run(job: Job, failures: dict[str, str], done: dict[str, JobResult]) -> bool:
    return not job.skipped and job.name not in done and job.name not in failures and job.loads not in failures


def _rows(jobs: Sequence[Job], folder: Path, failures: dict[str, str]) -> Iterator[Row]:
    done = read_results(Order(folder, ()).results)
    for job in jobs:
        saved = done.get(job.loads) if job.loads is not None else None
        failure = failures.get(job.name, "its checkpoint was not saved")
        yield row(job, done.get(job.name), saved, failure)


def _reason(order: Order, job: Job, ended: Ended) -> str:
    """Return why a job failed: a rank's report, or how ranks ended and the last log lines.

    Megatron explains some failures only in the log before it exits.
    """
    for path in sorted(order.failure(job.name, 0).parent.glob(f"{job.name}.*.txt")):
        report = path.read_text(encoding="utf-8")
        rank = int(path.suffixes[-2][1:])
        return _with_last_lines(order, rank, report) if report.startswith(SystemExit.__name__) else report
    return _with_last_lines(order, ended.rank or 0, str(ended) or "the ranks ended early")


def _with_last_lines(order: Order, rank: int, reason: str) -> str:
    log = log_of(order.folder, rank)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return " | ".join([reason, *lines[-_MOST_LINES:]])
