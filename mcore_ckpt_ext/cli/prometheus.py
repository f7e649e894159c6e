"""Writes a verification's result as metrics for the textfile collector of Prometheus' node_exporter.

The text has Prometheus' exposition format. The collector may read files that end in `.prom` at any time, so a file is
replaced atomically.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt_ext.storage.atomic_files import check_report, write_report
from mcore_ckpt_ext.storage.paths import is_remote

if TYPE_CHECKING:
    from mcore_ckpt_ext.operations.check_results import VerificationResult

_METRICS = "the metrics"
_BEGIN = "# HELP mcore_ckpt_"
_STATUSES = ("passed", "failed", "skipped")
_SEVERITIES = ("error", "warning")


@dataclass(frozen=True)
class Disk:
    """The files of a checkpoint: their size in bytes, and the time of the newest in seconds since 1970.

    `newest` is None if the store has no modification times.
    """

    nbytes: int
    newest: float | None


@dataclass(frozen=True)
class _Metric:
    name: str
    meaning: str
    values: Mapping[str, float]
    """Values by the value of `label`; by the empty string if there is no label."""
    label: str = ""


def check_metrics_file(path: Path) -> None:
    """Check that metrics may be written to a path.

    Raises:
        UsageError: the path is another kind of file, or its folder does not exist.
    """
    check_report(
        path,
        _is_metrics_file,
        what=_METRICS,
        conflict="--prometheus would overwrite something that is not a file of metrics",
        earlier="an earlier one of this option",
    )


def write_metrics(path: Path, text: str) -> None:
    """Replace a file of metrics atomically.

    Raises:
        DestinationError: the file cannot be written.
    """
    write_report(path, text, what=_METRICS)


def metrics(
    path: str,
    exit_code: int,
    seconds: float,
    result: VerificationResult | None = None,
    disk: Disk | None = None,
    *,
    quick: bool = False,
    file: str,
) -> str:
    """Return the text of the metrics.

    Args:
        path: path of the checkpoint, the label `path` of each metric.
        exit_code: exit code of the command.
        seconds: duration of the command.
        result: result of the verification; None if the checkpoint could not be verified.
        disk: size and time of the checkpoint's files; None as for `result`.
        quick: only metadata was checked; the label `depth` of each metric distinguishes quick and full verifications.
        file: name of the file of metrics, the label `file`: the collector refuses two files with the same series.
    """
    all_metrics = [
        *_run_metrics(exit_code, seconds),
        *(_result_metrics(result) if result else ()),
        *(_disk_metrics(disk) if disk else ()),
    ]
    depth = "quick" if quick else "full"
    labels = f'path="{_escape(_absolute(path))}",depth="{depth}",file="{_escape(file)}"'
    return "".join(text for metric in all_metrics for text in _lines(labels, metric))


def _absolute(path: str) -> str:
    """Return a path that does not depend on the current folder, so that two runs never share a series."""
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100  - also for a path that is no valid one


def disk_of(folder: Path) -> Disk:
    """Return the size of a folder in bytes, and the time of its newest file."""
    files = (
        folder.files_below().values()
        if is_remote(folder)
        else [path.stat() for path in folder.rglob("*") if path.is_file()]
    )
    return Disk(sum(file.st_size for file in files), max((file.st_mtime for file in files), default=0.0) or None)


def _run_metrics(exit_code: int, seconds: float) -> Iterator[_Metric]:
    yield _Metric("verify_exit_code", "Exit code: 0 sound, 1 not sound, 2 not readable.", _one(exit_code))
    yield _Metric("verify_timestamp_seconds", "When the last verification ended.", _one(time.time()))
    yield _Metric("verify_duration_seconds", "Time that the last verification took.", _one(seconds))


def _result_metrics(result: VerificationResult) -> Iterator[_Metric]:
    statuses: Counter[str] = Counter(check.status for check in result.checks)
    severities: Counter[str] = Counter(problem.severity for problem in result.problems)
    by_status = {status: float(statuses[status]) for status in _STATUSES}
    by_severity = {severity: float(severities[severity]) for severity in _SEVERITIES}
    yield _Metric("verify_sound", "Whether no check failed.", _one(result.sound))
    yield _Metric("verify_checks", "Checks by their status.", by_status, "status")
    yield _Metric("verify_problems", "Problems that were found, by their severity.", by_severity, "severity")
    if result.iteration is not None:
        yield _Metric("checkpoint_iteration", "Iteration of the checkpoint.", _one(result.iteration))


def _disk_metrics(disk: Disk) -> Iterator[_Metric]:
    yield _Metric("checkpoint_bytes", "Bytes of the checkpoint's files.", _one(disk.nbytes))
    if disk.newest is None:
        return
    yield _Metric("checkpoint_timestamp_seconds", "When its newest file was written.", _one(disk.newest))
    yield _Metric("checkpoint_age_seconds", "Age of its newest file.", _one(time.time() - disk.newest))


def _one(value: float) -> dict[str, float]:
    return {"": float(value)}


def _lines(labels: str, metric: _Metric) -> Iterator[str]:
    name = f"mcore_ckpt_{metric.name}"
    yield f"# HELP {name} {metric.meaning}\n# TYPE {name} gauge\n"
    for of_label, value in metric.values.items():
        label = f',{metric.label}="{of_label}"' if metric.label else ""
        yield f"{name}{{{labels}{label}}} {value!r}\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _is_metrics_file(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_BEGIN)) == _BEGIN.encode()
