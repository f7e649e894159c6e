"""Test parts of the demonstration: its progress messages, and its errors for folders that are not what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import how_far
import pytest
from demo import make_empty

DEMO = Path(how_far.__file__).with_name("demo.py")


def test_a_folder_that_is_no_checkout_is_refused_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), str(tmp_path / "demo"), "--megatron", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path} is no checkout of Megatron-LM: it has no pretrain_gpt.py" in done.stderr


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert make_empty(folder)
    (folder / "loss.png").touch()
    assert make_empty(folder)
    assert not (folder / "loss.png").exists()
    file = tmp_path / "mine" / "thesis.tex"
    file.parent.mkdir()
    file.touch()
    done = subprocess.run(
        [sys.executable, str(DEMO), str(file.parent)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, file.exists()) == (2, "", True)
    assert f"{file.parent} contains files that this program has not made" in done.stderr
    assert not make_empty(file)


def test_iterations_are_read_from_megatrons_lines() -> None:
    far = how_far.Iterations()
    assert far.text == "starting the ranks"
    far.write("[rank 7]  [2026-11-22 08:36:30] iteration       12/      20 | consumed samples: 96 | ...\n")
    far.write("[rank 7] something else\n")
    assert far.text == "iteration 12 of 20"


def test_progress_of_pip(tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    assert how_far._last_of_pip(log) == "making the environment"
    log.write_text("Collecting torch==2.13.0\n  Downloading torch-2.13.0.whl (800 MB)\n     ---- 3 MB\n")
    assert how_far._last_of_pip(log) == "Downloading torch-2.13.0.whl (800 MB)"


def test_elsewhere_than_on_a_terminal_nothing_moves(capsys: pytest.CaptureFixture[str]) -> None:
    with how_far.MovingLine(lambda: "far"):
        pass
    assert capsys.readouterr().out == ""
