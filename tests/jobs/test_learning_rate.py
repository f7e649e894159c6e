"""A learning rate that is changed on resuming counts as the flags say, where the package fills the optimizer.

The oracles are jobs by stock Megatron: one that never stopped, and one that had the new learning rate from the start.
Stock itself cannot resume so: 0.19 and 0.20 do not find their own parameter groups (KeyError).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.checkouts import checkout_job, version, with_checkout
from tests.harness.jobs import OFF, SAVED, Job, resume, run_job, train_and_save
from tests.harness.layouts import Layout

ONE = Layout(1, 1, 1)
NEW = ("--lr", "5e-4", "--min-lr", "5e-5")
# Another layout of the buffers, so that the package fills the optimizer.
BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "3000")
OVERRIDE, KEEP = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"


def rate(job: Job) -> float:
    """The learning rate of the first iteration after the checkpoint."""
    record = json.loads((job.folder / "losses.json").read_text())
    return record[str(SAVED + 1)]["learning_rate"]


def rates(folder: Path, **how: Any) -> tuple[float, float, dict[str, float]]:
    """That of the job that never stopped, with the old and with the new learning rate; and after a resume, by flag."""
    options = {"until": SAVED + 1, "environment": OFF, **how}
    saved = train_and_save(folder / "saved", ONE, **options)
    other = train_and_save(folder / "other", ONE, more=NEW, **options)
    resumed = {
        flag: rate(resume(folder / flag.strip("-"), ONE, saved.run, more=[*NEW, *BUCKETS, flag], **how))
        for flag in (OVERRIDE, KEEP)
    }
    return rate(saved), rate(other), resumed


def test_it_counts_where_it_overrides_and_only_there(tmp_path: Path) -> None:
    old, new, resumed = rates(tmp_path)
    assert old == pytest.approx(2 * new)
    assert resumed == {OVERRIDE: new, KEEP: old}


@with_checkout
def test_it_counts_as_in_the_checkout(tmp_path: Path) -> None:
    """Before 0.19 the stored bounds of the groups outweigh the flag, in stock Megatron and here."""
    old, new, resumed = rates(tmp_path, **checkout_job())
    counts = tuple(int(part) for part in str(version()).split(".")) >= (0, 19)
    assert resumed == {OVERRIDE: new if counts else old, KEEP: old}


def test_stock_does_not_find_its_groups(tmp_path: Path) -> None:
    """Why there is no oracle that resumes."""
    saved = train_and_save(tmp_path / "saved", ONE, environment=OFF)
    result = run_job(tmp_path / "stock", ONE, load=saved.run, more=[*NEW, OVERRIDE], environment=OFF)
    assert result.returncode != 0
    assert "KeyError: (None, 0.0005, 5e-05" in result.output
