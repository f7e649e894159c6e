"""Test that a job which is to go on outlives every failure of its writers, each reported with its cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.launch import RunResult

from tests.harness.saving import CAUSES, assert_told, assert_whole, iterations_in, run_saving

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


TROUBLES = {
    1: {"ranks": [1], "what": "idle"},
    2: {"ranks": [1], "what": "SIGKILL", "preload": True},
    3: {"ranks": [1], "what": "raise", "settle": True},
    4: {"ranks": [1], "what": "full", "settle": True},
    5: {"ranks": [0], "what": "vanish", "settle": True},
    6: {"ranks": [0], "what": "SIGSTOP", "settle": True},
    7: {"ranks": [1], "what": "mute", "settle": True},
    8: {"ranks": [1], "what": "lose", "settle": True},
    9: {"ranks": [0], "what": "bar", "settle": True},
    10: {"ranks": [0], "what": "clear", "settle": True},
    11: {"ranks": [0], "what": "bar", "finish": True},
    12: {"ranks": [0], "what": "clear"},
    13: {"ranks": [1], "what": "end"},
}
"""By the number of the save, which is half its iteration; a save that cannot begin does not count."""


@pytest.fixture(scope="module")
def troubled(base: Path) -> RunResult:
    """One job that goes on through everything; a file bars the way to the folder of iteration 14."""
    run = base / "troubled" / "checkpoints"
    run.mkdir(parents=True)
    (run / "iter_0000014").write_text("in the way")
    environment = {"MCORE_CKPT_EXT_WRITER_PATIENCE": "15"}
    more = ["--use-dist-ckpt", "--async-save", "--ckpt-ext-on-save-failure", "continue"]
    return run_saving(base / "troubled", 30, trouble=TROUBLES, environment=environment, more=more)


def test_training_goes_on_if_the_user_wants_it(troubled: RunResult) -> None:
    assert troubled.returncode == 0, troubled.output[-6000:]
    assert "iteration       30/      30" in troubled.output


def test_no_save_takes_the_results_of_one_that_was_given_up(troubled: RunResult) -> None:
    assert "results of another" not in troubled.output


@pytest.mark.parametrize(
    ("iteration", "cause"),
    [
        (4, CAUSES["SIGKILL"]),
        (6, CAUSES["raise"]),
        (8, CAUSES["full"]),
        (10, CAUSES["vanish"]),
        (12, CAUSES["SIGSTOP"]),
        (14, r"rank 0: FileExistsError"),
        (16, CAUSES["mute"]),
        (18, CAUSES["lose"]),
        (20, r"IsADirectoryError"),
        (26, r"rank 0: iteration 24 was not saved: IsADirectoryError"),
    ],
)
def test_each_failure_is_reported_with_its_cause(iteration: int, cause: str, troubled: RunResult) -> None:
    assert_told(troubled.output, iteration, cause)


def test_failed_saves_are_removed_and_others_are_complete(troubled: RunResult, base: Path) -> None:
    run = base / "troubled" / "checkpoints"
    assert [number for number in iterations_in(run) if number != 14] == [2, 22, 28, 30]
    assert_whole(troubled.output, run, [2, 22, 28, 30])
