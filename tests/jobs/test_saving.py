"""Test background saves with genuine Megatron-LM 0.19.2: asynchronous, durable, and all failures reported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from megatron_on_cpu import launch, toy_jobs
from megatron_on_cpu.launch import TIMED_OUT, RunResult

from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE
from tests.harness.checkouts import installed_is_before
from tests.harness.jobs import TIME_LIMIT
from tests.harness.saving import (
    ASYNCHRONOUS,
    RANKS,
    assert_trained_meanwhile,
    durable_lines,
    iterations_in,
    run_held,
    run_saving,
    tracked,
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def synchronous(base: Path) -> RunResult:
    """Saved at iterations 4 and 8 without `--async-save`; the tracker that is there before has a second name."""
    run = base / "synchronous" / "checkpoints"
    run.mkdir(parents=True)
    (run / TRACKER_FILE).write_text("1")
    (base / "tracker").hardlink_to(run / TRACKER_FILE)
    result = run_saving(base / "synchronous", 8, interval=4, more=["--use-dist-ckpt"])
    assert result.returncode == 0, result.output[-6000:]
    return result


@pytest.fixture(scope="module")
def held(base: Path) -> RunResult:
    """The flags of existing scripts; see `run_held`."""
    result = run_held(base / "held")
    assert result.returncode == 0, result.output[-6000:]
    return result


def test_one_line_says_what_was_chosen_and_why(held: RunResult) -> None:
    lines = [line for line in held.output.splitlines() if "--async-save:" in line]
    assert len(lines) == 1
    assert lines[0].startswith("[rank 0]")
    assert "async_strategy = mcore (nvrx cannot be used:" in lines[0]
    assert "use_persistent_ckpt_worker = True (without it" in lines[0]


def test_training_goes_on_while_the_writers_are_at_work(held: RunResult) -> None:
    assert_trained_meanwhile(held.output)


@pytest.mark.parametrize("iteration", [4, 8])
def test_it_is_the_synchronous_checkpoint_bit_for_bit(
    iteration: int, held: RunResult, synchronous: RunResult, base: Path
) -> None:
    folders = [base / name / "checkpoints" / f"iter_{iteration:07d}" for name in ("held", "synchronous")]
    comparison = compare(*folders)
    assert comparison.tensors_equal, comparison
    # One of the jobs trains for more iterations, over which its weight decay would grow.
    assert {one.name for one in comparison.settings if not one.equal} == {"scheduler: wd_incr_steps"}


def test_the_record_says_what_the_save_took(held: RunResult, base: Path) -> None:
    lines, run = durable_lines(held.output), base / "held" / "checkpoints"
    assert sorted(lines) == iterations_in(run) == [4, 8, 12]
    record = json.loads((run / "iter_0000008" / "mcore_ckpt_ext.json").read_text())["saved"]
    assert record["asynchronous"] is True
    assert min(record["seconds_in_background"], record["seconds_stalled"]) > 0
    on_disk = sum(path.stat().st_size for path in (run / "iter_0000008").glob("*.distcp"))
    assert record["bytes"] == on_disk
    assert f"{record['bytes'] / 1e6:,.1f}" == lines[8]["megabytes"]
    assert f"{record['seconds_stalled']:.2f}" == lines[8]["stalled"]


def test_a_synchronous_save_has_its_line_and_record_too(synchronous: RunResult, base: Path) -> None:
    run = base / "synchronous" / "checkpoints"
    assert sorted(durable_lines(synchronous.output)) == iterations_in(run) == [4, 8]
    assert tracked(run) == 8
    record = json.loads((run / "iter_0000004" / "mcore_ckpt_ext.json").read_text())["saved"]
    assert (record["asynchronous"], record["seconds_in_background"]) == (False, 0)


def test_the_tracker_is_replaced_and_never_written_over(synchronous: RunResult, base: Path) -> None:
    """Megatron truncates it first: a kill between the two would leave a run that names nothing."""
    assert (base / "tracker").read_text() == "1"


def test_nothing_but_checkpoints_is_left(held: RunResult, base: Path) -> None:
    found = sorted(path.name for path in (base / "held" / "checkpoints").iterdir())
    assert found == ["iter_0000004", "iter_0000008", "iter_0000012", "latest_checkpointed_iteration.txt"]


@pytest.fixture(scope="module")
def stopped(base: Path) -> RunResult:
    """The default: a writer is killed at the second save."""
    return run_saving(base / "stopped", 8, trouble={2: {"ranks": [1], "what": "SIGKILL"}})


def test_training_stops_on_every_rank_by_default(stopped: RunResult, base: Path) -> None:
    assert stopped.returncode not in (0, TIMED_OUT)
    for rank in range(RANKS):
        form = rf"^\[rank {rank}\] .*SaveFailedError: iteration 4(, 6)? was not saved"
        assert re.search(form, stopped.output, re.MULTILINE)
    assert "rank 1: its writer" in stopped.output
    assert "--ckpt-ext-on-save-failure continue" in stopped.output
    run = base / "stopped" / "checkpoints"
    assert (iterations_in(run), tracked(run)) == ([2], 2)


def test_a_read_only_folder_ends_the_job_with_a_message(base: Path) -> None:
    """Not even root may make a folder there."""
    result = run_saving(base / "read-only", 4, save=Path("/sys/kernel/checkpoints"))
    assert result.returncode not in (0, TIMED_OUT)
    for rank in range(RANKS):
        form = rf"^\[rank {rank}\] .*SaveFailedError: iteration 2 cannot be saved to /sys"
        assert re.search(form, result.output, re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.skipif(installed_is_before(0, 18), reason="--step-batch-size-schedule is of 0.18")
def test_an_iteration_that_is_saved_twice_is_whole(base: Path) -> None:
    """Megatron saves it once more where its batch size grows; the writers of the first save have not ended then."""
    run = base / "twice" / "checkpoints"
    run.mkdir(parents=True)
    schedule = ["--step-batch-size-schedule", "0:4 512:8", "--make-vocab-size-divisible-by", "128"]
    arguments = toy_jobs.tiny_gpt(1, 2, iterations=6, save=run, save_interval=4, more=[*schedule, *ASYNCHRONOUS])
    place = arguments.index("--global-batch-size")
    del arguments[place : place + 2]
    result = launch.run(2, launch.TRAIN_GPT, arguments, timeout=TIME_LIMIT, log_file=base / "twice" / "log")
    assert result.returncode == 0, result.output[-6000:]
    assert result.output.count("iteration 4 is complete on disk") == 2
    assert (iterations_in(run), tracked(run)) == ([4, 6], 6)
