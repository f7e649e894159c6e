"""Test the self-test with genuine Megatron, Transformer Engine and NCCL, on all GPUs and on one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from documentation.json_schemas import schema_of

from mcore_ckpt_ext.cli.selftest import start_ranks
from mcore_ckpt_ext.devices import accelerator_type, device_module
from mcore_ckpt_ext.selftest.machine import this_machine
from mcore_ckpt_ext.selftest.plan import plan
from mcore_ckpt_ext.selftest.run import run
from tests.harness.json_schema import violations

TIME_LIMIT = 400
AWARE = ("--use-precision-aware-optimizer",)
OPTIMIZERS = {
    "masters in the fused optimizer": AWARE,
    "half of it on the CPU, overlapping": (
        *AWARE, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5", "--overlap-cpu-optimizer-d2h-h2d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", [(), ("--nproc", "1")])
def test_all_jobs_pass(
    words: tuple[str, ...],
    tmp_path: Path,
    at_most: Callable[[float], float],
    figure: Callable[[str], None],
    keep: Callable[[Path, str], None],
) -> None:
    if words and device_module(str(accelerator_type())).device_count() == 1:
        pytest.skip("with one GPU, this is what runs without --nproc")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "mcore_ckpt_ext", "selftest", "--folder", str(tmp_path), "--json", str(report)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=at_most(TIME_LIMIT), check=False)
    figure(done.stdout)
    if report.exists():
        keep(report, f"selftest{''.join(words)}.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert violations(found, schema_of("selftest")) == []
    assert found["passed"]
    skipped = [(row["model"], row["details"]) for row in found["rows"] if row["outcome"] == "skipped"]
    figure(f"skipped: {skipped}")
    assert {path.name for path in tmp_path.iterdir()} == {"report.json"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_go_on_as_if_they_had_not_stopped(name: str, tmp_path: Path) -> None:
    """A job that saves, and one that resumes it, with real streams between the device and the CPU."""
    machine = this_machine(None)
    if machine.no_engine:
        pytest.skip(machine.no_engine)
    jobs = [replace(job, arguments=(*job.arguments, *OPTIMIZERS[name]), expects="") for job in plan(machine)[:2]]
    rows, _ = run(jobs, start_ranks, tmp_path)
    assert [row.outcome for row in rows] == ["passed", "passed"], [row.details for row in rows]
