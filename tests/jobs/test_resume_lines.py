"""Test the log lines of a resume: they name what genuine Megatron loaded, and what the checkpoint lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import training_state

from mcore_ckpt_ext import open_checkpoint
from tests.harness.checkouts import checkout_job, only_for
from tests.harness.jobs import SAVED, assert_same_training_state, resume, train_and_save
from tests.harness.layouts import BATCH, Layout
from tests.harness.turns import Results, Turn, run_in_turn

PIPELINE, TENSOR = Layout(1, 2, 2), Layout(2, 1, 2)
DROPPED = "--ckpt-drop-redundant-extra-state"
RECOVERY = ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "3"]
# Megatron 0.19.2 takes a recovery checkpoint that is newer than the iteration that was asked for, too.
LOADS = {
    "named": (["--ckpt-step", str(SAVED)], SAVED),
    "newest": (RECOVERY, 6),
    "named beside a recovery checkpoint": (["--ckpt-step", str(SAVED), *RECOVERY], 6),
}


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A run with a checkpoint of iteration 4 and a recovery checkpoint of iteration 6, and its resumes."""
    folder = tmp_path_factory.mktemp("recovery")
    load = folder / "saved" / "checkpoints"
    saved = Turn(folder / "saved", PIPELINE, saves=True, until=7, more=RECOVERY)
    loads = [Turn(folder / name, TENSOR, load=load, until=8, more=more) for name, (more, _) in LOADS.items()]
    return run_in_turn(folder, [saved, *loads])


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOADS)
def test_the_line_names_the_iteration_that_was_loaded(name: str, turns: Results) -> None:
    job = turns.job(name)
    loaded = training_state(job.at_load)["iteration"]
    assert (loaded, min(job.losses)) == (LOADS[name][1], loaded + 1)
    assert re.findall(r"iteration (\d+) was loaded", "\n".join(job.said)) == [str(loaded)]
    assert re.findall(r"data: goes on at sample (\d+)", "\n".join(job.said)) == [str(BATCH * loaded)]


@only_for("0.20")
@pytest.mark.parametrize("more", [[], [DROPPED]], ids=["kept", "left out"])
def test_the_line_about_extra_states_is_true(more: list[str], tmp_path: Path) -> None:
    saved = train_and_save(tmp_path / "saved", PIPELINE, more=more, **checkout_job())
    keys = open_checkpoint(saved.run).files.index().objects
    assert any("_extra_state" in key for key in keys) == (not more)
    resumed = resume(tmp_path / "resumed", TENSOR, saved.run, **checkout_job())
    lines = [line for line in resumed.said if "extra states" in line]
    assert len(lines) == len(more)
    assert all("are not in the checkpoint, whose job left them out (--ckpt-drop-redundant" in line for line in lines)
    assert_same_training_state(saved.at_save, resumed.at_load)
