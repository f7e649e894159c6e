"""Test that jobs share a process that has imported Megatron, but no environment, output or errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble

from tests.harness.jobs import resume
from tests.harness.layouts import Layout

SAYS = """
import os, sys, time
import megatron.training.checkpointing as checkpointing
print("arguments", sys.argv[1:], "folder", os.getcwd(), "own", os.environ.get("TEST_OWN"))
print("hooked", hasattr(checkpointing.load_checkpoint, "__wrapped__"), flush=True)
checkpointing.load_checkpoint = None
if sys.argv[1] == "fail":
    sys.exit(3)
if sys.argv[1] == "hang":
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SAYS)
    return path


def test_a_job_finds_megatron_as_it_was_imported(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the job before it left it."""
    first = launch.run(2, script, ["one"], timeout=200, environment={"TEST_OWN": "mine"})
    monkeypatch.chdir(tmp_path)
    second = launch.run(1, script, ["two"], timeout=200)
    assert (first.returncode, second.returncode) == (0, 0)
    for rank in (0, 1):
        assert f"[rank {rank}] arguments ['one'] folder " in first.output
    assert first.output.count("own mine") == first.output.count("hooked True") == 2
    assert second.output == f"[rank 0] arguments ['two'] folder {tmp_path} own None\n[rank 0] hooked True\n"


def test_each_job_has_its_own_records(tmp_path: Path) -> None:
    for name in ("one", "two"):
        job = resume(tmp_path / name, Layout(1, 1, 1), tmp_path / "nothing", until=1)
        assert list(job.losses) == [1]
        assert assemble(job.at_load)


def test_a_job_without_the_package_is_not_hooked(script: Path) -> None:
    """What counts while Megatron is imported is the job's own, too."""
    result = launch.run(1, script, ["one"], timeout=200, environment={"MCORE_CKPT_EXT": "0"})
    assert "hooked False" in result.output


def test_the_result_is_reported(script: Path) -> None:
    assert launch.run(1, script, ["fail"], timeout=200).returncode == 3
    result = launch.run(1, script, ["hang"], timeout=5)
    assert result.returncode == launch.TIMED_OUT
    assert "arguments ['hang']" in result.output
    assert launch.run(1, script, ["after"], timeout=200).returncode == 0


def test_a_checkout_that_is_none_is_said(script: Path, tmp_path: Path) -> None:
    result = launch.run(1, script, [], timeout=200, megatron=tmp_path)
    assert result.returncode == 1
    assert "No module named 'megatron.core'" in result.output
