"""Jobs that go on by themselves under genuine torchrun agents: a node dies, one returns, ranks wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.elastic_jobs import Ended, Scenario

from mcore_ckpt_ext import verify
from tests.harness.elastic import elastic_arguments
from tests.harness.jobs import RANK_SCRIPTS, assert_same_optimizer, copy_of, resume
from tests.harness.layouts import Layout

HANDLES_SIGTERM = ["--exit-signal-handler"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Four ranks on two nodes: one dies, two ranks go on, and another node takes its place."""
    folder = tmp_path_factory.mktemp("elastic")
    return Scenario(
        folder,
        elastic_arguments(folder, more=HANDLES_SIGTERM),
        gates=[5, 6],
        steps=[("at gate 5", "SIGKILL", 1), ("agent 1 ended", "open", 5), ("at gate 6", "start", 2)],
    ).run()


def test_the_death_and_the_return_of_a_node_end_nothing(job: Ended) -> None:
    assert job.codes == {"0": 0, "1": -9, "2": 0}
    assert job.choices == ["2 of 2 GPUs: TP1 x PP1 x DP2 in place of TP1 x PP4 x DP1; global batch 8 kept"]
    assert [sorted(job.losses(start)) for start in (1, 2)] == [[5, 6], [7, 8]]
    assert job.left == []


def test_the_live_optimizer_is_that_of_the_checkpoint(job: Ended) -> None:
    assert_same_optimizer(job.dump(0, "after_save_0000004"), job.dump(1, "after_load"))
    # The returning node ended the second start by SIGTERM: what it had trained was saved.
    assert_same_optimizer(job.dump(1, "after_save_0000006"), job.dump(2, "after_load"))


def test_losses_are_those_of_a_job_started_by_hand(job: Ended, tmp_path: Path) -> None:
    run = copy_of(job.folder / "checkpoints", tmp_path / "run")
    by_hand = resume(tmp_path / "job", Layout(1, 1, 2), run, until=6, more=["--micro-batch-size", "1"])
    assert job.losses(1) == by_hand.losses


def test_ranks_that_no_layout_uses_wait_and_end_with_the_job(tmp_path: Path) -> None:
    waiting = Scenario(
        tmp_path,
        elastic_arguments(tmp_path, 1, 2, more=["--exit-interval", "2"]),
        agents=1,
        ranks=3,
        nodes="1:1",
        max_restarts=0,
    ).run()
    assert waiting.choices == ["2 of 3 GPUs: TP1 x PP2 x DP1; global batch 8 kept; 1 GPU waits"]
    assert waiting.codes == {"0": 0}
    assert sorted(waiting.losses(0)) == [1, 2]
    assert waiting.left == []


def test_a_save_in_flight_when_a_node_dies_leaves_nothing_behind(tmp_path: Path) -> None:
    """The writers of the save of iteration 4 wait until the node is dead."""
    held = {"2": {"ranks": [0, 1], "what": f"wait {tmp_path / 'gate-5'}"}}
    asynchronous = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
    ended = Scenario(
        tmp_path,
        elastic_arguments(tmp_path, 1, 2, every=2, more=asynchronous),
        ranks=1,
        gates=[5],
        steps=[("at gate 5", "SIGKILL", 1), ("agent 1 ended", "open", 5)],
        environment={"TEST_RANK_SCRIPTS": str(RANK_SCRIPTS), "TEST_TROUBLE": str(held).replace("'", '"')},
        plugins=[RANK_SCRIPTS / "trouble.py"],
    ).run()
    assert ended.codes == {"0": 0, "1": -9}
    assert sorted(ended.losses(1)) == [3, 4, 5, 6, 7, 8]
    assert ended.left == []
    run = tmp_path / "checkpoints"
    assert ended.iterations == [*(f"iter_{number:07d}" for number in (2, 4, 6, 8)), "latest_checkpointed_iteration.txt"]
    assert all(verify(run / f"iter_{number:07d}").sound for number in (2, 4, 6, 8))
