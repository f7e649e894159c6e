"""Measures what the accounts of data order and mathematics add to a resume under an unchanged layout.

    python benchmarks/accounts.py CHECKPOINT [--runs 20]

They are pure arithmetic on the arguments of the job. Shown are medians of the processor's time, beside that of opening
the checkpoint, which every load does first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.continuity.data_order import data_order, followed_history
from mcore_ckpt_ext.continuity.mathematics import differences_of_jobs, sentence_of
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.versions import NEWEST

GOAL_SECONDS = 0.010
RAMP: Mapping[str, Any] = {"rampup_batch_size": ["8", "8", "100000"], "global_batch_size": 8192}
RAMPS: Mapping[str, Mapping[str, Any]] = {"constant batch size": {}, "ramp of a thousand sizes": RAMP}


def account(job: JobArguments) -> str:
    """Make all accounts of a resume under the layout of the save."""
    data_order(job, job)
    followed_history(job, job)
    return sentence_of(differences_of_jobs(job, job, NEWEST))


def seconds(action: Callable[[], object], runs: int) -> float:
    """Return the median of the processor's time."""
    durations = []
    for _ in range(runs):
        begun = time.process_time()
        action()
        durations.append(time.process_time() - begun)
    return statistics.median(durations)


def main() -> None:
    """Measure each loader and batch-size schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    requested = parser.parse_args()
    opening = seconds(lambda: open_checkpoint(requested.checkpoint).job.arguments(), requested.runs)
    print(f"opening the checkpoint: {opening * 1e3:.1f} ms; goal of the accounts: {GOAL_SECONDS * 1e3:.0f} ms")
    arguments = open_checkpoint(requested.checkpoint).job.arguments()
    for loader in ("single", "cyclic"):
        for name, ramp in RAMPS.items():
            job = arguments.replace(dataloader_type=loader, **ramp)
            spent = seconds(partial(account, job), requested.runs)
            print(f"{loader}, {name}: {spent * 1e3:.2f} ms, {spent / opening:.3f} of opening it")


if __name__ == "__main__":
    main()
