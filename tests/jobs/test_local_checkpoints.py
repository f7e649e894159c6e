"""Test jobs whose newest checkpoint is a local one (`--non-persistent-ckpt-type local`), which has one layout only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.launch import RunResult

from tests.harness.jobs import run_job
from tests.harness.layouts import Layout
from tests.harness.packages import resiliency

pytestmark = pytest.mark.nightly
TENSOR, PIPELINE = Layout(2, 1, 2), Layout(1, 2, 2)


def run(folder: Path, layout: Layout, disk: Path, **options: Any) -> RunResult:
    flags = ["--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir", str(disk)]
    flags += ["--non-persistent-save-interval", "2", "--non-persistent-local-ckpt-algo", "atomic"]
    path = os.pathsep.join([str(Path(launch.__file__).parents[1]), str(resiliency())])
    return run_job(folder, layout, more=flags, environment={"PYTHONPATH": path}, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a persistent checkpoint of iteration 4 and a local one of iteration 6."""
    folder = tmp_path_factory.mktemp("local")
    result = run(folder, TENSOR, folder / "disk", saves=True, until=6)
    assert result.returncode == 0, result.output[-6000:]
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    return folder


def copied_disk(saved: Path, folder: Path) -> Path:
    return Path(shutil.copytree(saved / "disk", folder / "disk"))


def test_the_same_layout_resumes_from_it(saved: Path, tmp_path: Path) -> None:
    result = run(tmp_path, TENSOR, copied_disk(saved, tmp_path), load=saved / "checkpoints", until=7)
    assert result.returncode == 0, result.output[-6000:]
    assert "at iteration 6" in result.output


def test_another_layout_is_refused_before_training(saved: Path, tmp_path: Path) -> None:
    result = run(tmp_path, PIPELINE, copied_disk(saved, tmp_path), load=saved / "checkpoints", until=7)
    assert result.returncode != 0
    assert "local checkpoints cannot be resharded" in result.output
    assert "found: iteration 6 of a job with TP2 x PP1 x DP1" in result.output
    assert "leave out --non-persistent-ckpt-type: iteration 4 follows" in result.output
    assert "AssertionError" not in result.output


def test_more_ranks_resume_from_the_persistent_one_and_say_so(saved: Path, tmp_path: Path) -> None:
    more = Layout(2, 1, 4)
    result = run(tmp_path, more, copied_disk(saved, tmp_path), load=saved / "checkpoints", until=5)
    assert result.returncode == 0, result.output[-6000:]
    assert (
        "the local checkpoint of iteration 6 cannot be used: only 2 of 4 ranks have their part of it, and it cannot be "
        "resharded; iteration 4 is loaded"
    ) in result.output
