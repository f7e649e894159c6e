"""Test `mcore-ckpt selftest` where it cannot run; `tests/jobs/test_selftest.py` tests its results."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.selftest import machine
from mcore_ckpt_ext.selftest.jobs import Job, Machine, Order, layout_of
from mcore_ckpt_ext.selftest.launcher import Ended

FIND_SPEC = machine.find_spec  # type: ignore[attr-defined]


@pytest.fixture
def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "accelerator_type", lambda: None)


@pytest.mark.usefixtures("without_device")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["selftest", "--folder", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: Megatron needs a GPU, and there is none here" in captured.err
    assert "the demonstration of the repository runs on the CPU" in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_device")
def test_without_a_gpu_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["exit_code"], found["error"]["kind"]) == (False, 2, "UsageError")


@pytest.mark.usefixtures("without_device")
def test_the_result_of_an_earlier_test_does_not_remain(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text('{"command": "selftest", "ok": true}')
    assert main(["selftest", "--json", str(report)]) == 2
    assert not report.exists()


def test_a_reason_of_several_lines_is_printed_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(order: Order) -> Ended:
        report = order.failure("save", 0)
        report.parent.mkdir()
        report.write_text("SaveFailedError: not saved:\n  rank 0: the disk is full")
        return Ended(False, "ended with exit code 1", 0)

    job = Job("save", "gpt", "dp_reshardable", layout_of(1), "save")
    monkeypatch.setattr("mcore_ckpt_ext.selftest.machine.this_machine", lambda ranks: Machine(1, "gloo", "", "no"))
    monkeypatch.setattr("mcore_ckpt_ext.selftest.plan.plan", lambda machine: (job,))
    monkeypatch.setattr("mcore_ckpt_ext.cli.selftest.start_ranks", fail)
    assert main(["selftest", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "gpt, TP1 x PP1 x DP1, dp_reshardable, save: SaveFailedError: not saved:",
        "  rank 0: the disk is full",
        "FAILED: 1 of 1",
    ]


def test_folders_are_checked_before_anything_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A result that cannot be written is not found after minutes of training."""
    notes = tmp_path / "notes.json"
    notes.write_text("{}")
    words = {
        "the folder of the result does not exist": ["--json", str(tmp_path / "missing" / "report.json")],
        "--json would overwrite something that is not a result of this command": ["--json", str(notes)],
        "--folder names no folder": ["--folder", str(notes)],
    }
    for message, options in words.items():
        assert main(["selftest", *options]) == 2
        assert message in capsys.readouterr().err
    assert notes.read_text() == "{}"


def test_the_number_of_ranks_on_a_node_is_that_of_srun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun's `--nproc-per-node`: what two nodes have in all is another number."""
    step = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[03-04]"}
    for name, value in {**step, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "42"}.items():
        monkeypatch.setenv(name, value)
    for number in ("4", "16"):
        assert main(["selftest", "--nproc", number]) == 2
        message = capsys.readouterr().err
        assert "torchrun or srun has started the ranks; found: 8 on this node, 16 in all" in message
        assert f"expected: --nproc {number} on this node; hint: leave --nproc out" in message
    assert main(["selftest", "--nproc", "8"]) == 2
    assert "pass --folder FOLDER, on a file system that all nodes share" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("megatron", "Megatron is not installed here"),
        ("megatron.core", "Megatron is not installed here"),
        ("megatron.training", "only Megatron Core is installed here"),
        ("psutil", "Megatron needs psutil to save, and it is not installed here"),
    ],
)
def test_without_megatron(missing: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("megatron.core")  # skipped where it cannot be installed: tests/conftest.py
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == missing else FIND_SPEC(name))
    with pytest.raises(machine.UsageError, match=says):  # type: ignore[attr-defined]
        machine.require_megatron()


def test_megatron_is_here() -> None:
    import_module("megatron.core")  # skipped where it cannot be installed: tests/conftest.py
    machine.require_megatron()
    assert machine.versions().keys() >= {"mcore_ckpt_ext", "torch", "megatron-core"}


def test_versions_of_the_driver_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "driver_versions", lambda: {"NCCL": "2.27.5", "NVIDIA driver": "570.124.06"})
    assert {"NCCL": "2.27.5", "NVIDIA driver": "570.124.06"}.items() <= machine.versions().items()
