"""Test background saves with the strategy `nvrx`, which Megatron 0.17 and later prefer if it is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.launch import RunResult

from mcore_ckpt_ext.operations.comparison import compare
from tests.harness.jobs import RANK_SCRIPTS
from tests.harness.packages import resiliency
from tests.harness.saving import (
    ASYNCHRONOUS,
    CAUSES,
    assert_told,
    assert_trained_meanwhile,
    assert_whole,
    durable_lines,
    iterations_in,
    run_held,
    run_saving,
)

pytestmark = pytest.mark.nightly
RANKS = 2
# Its writer would otherwise ask for a GPU of its own.
FLAGS = (*ASYNCHRONOUS, "--async-ckpt-use-cpu-shm")
TROUBLES = {
    1: {"ranks": [1], "what": "SIGKILL", "preload": True},
    2: {"ranks": [1], "what": "raise", "settle": True},
    3: {"ranks": [1], "what": "full", "settle": True},
    4: {"ranks": [0], "what": "vanish", "settle": True},
    5: {"ranks": [0], "what": "SIGSTOP", "settle": True},
    6: {"ranks": [1], "what": "lose", "settle": True},
    8: {"ranks": [1], "what": "SIGKILL", "settle": True},
}


def beside(**environment: str) -> dict[str, Any]:
    """What puts the package into a job."""
    path = os.pathsep.join([str(Path(launch.__file__).parents[1]), str(resiliency())])
    return {
        "ranks": RANKS,
        "environment": {"PYTHONPATH": path, **environment},
        "plugins": [RANK_SCRIPTS / "nvrx_on_cpu.py"],
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvrx")


@pytest.fixture(scope="module")
def held(base: Path) -> RunResult:
    result = run_held(base / "held", more=FLAGS, **beside())
    assert result.returncode == 0, result.output[-6000:]
    return result


@pytest.fixture(scope="module")
def troubled(base: Path) -> RunResult:
    more = [*FLAGS, "--ckpt-ext-on-save-failure", "continue"]
    return run_saving(base / "troubled", 18, trouble=TROUBLES, more=more, **beside(MCORE_CKPT_EXT_WRITER_PATIENCE="15"))


def test_it_is_the_one_that_saves(held: RunResult) -> None:
    lines = [line for line in held.output.splitlines() if "--async-save:" in line]
    assert len(lines) == 1
    assert "use_persistent_ckpt_worker = True (without it" in lines[0]
    assert "async_strategy" not in lines[0]
    assert "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async prepares a write" in held.output


def test_training_goes_on_and_the_checkpoint_is_the_synchronous_one(held: RunResult, base: Path) -> None:
    assert_trained_meanwhile(held.output)
    assert sorted(durable_lines(held.output)) == iterations_in(base / "held" / "checkpoints") == [4, 8, 12]
    result = run_saving(base / "synchronous", 12, ranks=RANKS, interval=4, more=["--use-dist-ckpt"])
    assert result.returncode == 0, result.output[-6000:]
    for iteration in (4, 8):
        folders = [base / name / "checkpoints" / f"iter_{iteration:07d}" for name in ("held", "synchronous")]
        comparison = compare(*folders)
        assert comparison.equal, comparison


@pytest.mark.parametrize(
    ("iteration", "cause"),
    [
        (2, CAUSES["SIGKILL"]),
        (4, CAUSES["raise"]),
        (6, CAUSES["full"]),
        (8, CAUSES["vanish"]),
        (10, CAUSES["SIGSTOP"]),
        (12, CAUSES["lose"]),
        (16, CAUSES["SIGKILL"]),
    ],
)
def test_each_failure_is_reported_with_its_cause(iteration: int, cause: str, troubled: RunResult) -> None:
    assert_told(troubled.output, iteration, cause)


def test_failed_saves_are_removed_and_others_are_complete(troubled: RunResult, base: Path) -> None:
    assert troubled.returncode == 0, troubled.output[-6000:]
    run = base / "troubled" / "checkpoints"
    assert iterations_in(run) == [14, 18]
    assert_whole(troubled.output, run, [14, 18])
