"""More of jobs that go on by themselves: drained nodes, those that wait, deaths at other moments, refusals."""

from __future__ import annotations

from pathlib import Path

from megatron_on_cpu.elastic_jobs import Scenario

from tests.harness.elastic import elastic_arguments
from tests.harness.jobs import RANK_SCRIPTS, assert_same_optimizer


def test_a_drained_node_costs_no_step(tmp_path: Path) -> None:
    """Its agent gets SIGTERM; all ranks save, and those of the other node go on."""
    ended = Scenario(
        tmp_path,
        elastic_arguments(tmp_path, 1, 2, more=["--exit-signal-handler"]),
        ranks=1,
        gates=[3],
        steps=[("at gate 3", "SIGTERM", 1), ("death signal", "open", 3)],
    ).run()
    assert ended.codes == {"0": 0, "1": 1}
    assert [sorted(ended.losses(start)) for start in (0, 1)] == [[1, 2, 3], [4, 5, 6, 7, 8]]
    assert_same_optimizer(ended.dump(0, "after_save_0000003"), ended.dump(1, "after_load"))
    assert ended.left == []


def test_the_death_of_a_node_that_waits_disturbs_nothing(tmp_path: Path) -> None:
    """Six ranks, of which two wait; their node dies first, then one that trains."""
    ended = Scenario(
        tmp_path,
        elastic_arguments(tmp_path, 1, 4, every=2),
        agents=3,
        ranks=2,
        nodes="1:3",
        gates=[3, 5],
        steps=[
            ("at gate 3", "SIGKILL", 2), ("agent 2 ended", "open", 3),
            ("at gate 5", "SIGKILL", 1), ("agent 1 ended", "open", 5),
        ],
    ).run()  # fmt: skip
    assert ended.codes == {"0": 0, "1": -9, "2": -9}
    assert [choice.split()[0] for choice in ended.choices] == ["4", "2"]
    assert len(ended.starts) == 2
    assert_same_optimizer(ended.dump(0, "after_save_0000004"), ended.dump(1, "after_load"))
    assert ended.left == []


def test_the_death_of_a_node_during_a_load(tmp_path: Path) -> None:
    """Four nodes of one rank: one dies while training, another one while the others load; two go on."""
    ended = Scenario(
        tmp_path,
        elastic_arguments(tmp_path),
        agents=4,
        ranks=1,
        nodes="1:4",
        gates=[5],
        steps=[
            ("at gate 5", "SIGKILL", 3), ("agent 3 ended", "open", 5),
            ("while loading", "SIGKILL", 1), ("agent 1 ended", "open", "load"),
        ],
        environment={"TEST_FOLDER": str(tmp_path)},
        plugins=[RANK_SCRIPTS / "stop_loading.py"],
    ).run()  # fmt: skip
    assert ended.codes == {"0": 0, "1": -9, "2": 0, "3": -9}
    assert [choice.split(":")[0] for choice in ended.choices] == ["2 of 3 GPUs", "2 of 2 GPUs"]
    assert not ended.dump(1, "after_load").exists()
    assert sorted(ended.losses(2)) == [5, 6, 7, 8]
    assert_same_optimizer(ended.dump(0, "after_save_0000004"), ended.dump(2, "after_load"))
    assert ended.left == []


def test_the_death_of_two_nodes_in_turn_costs_one_start(tmp_path: Path) -> None:
    """The second one dies before the others have met again."""
    ended = Scenario(
        tmp_path,
        elastic_arguments(tmp_path),
        agents=4,
        ranks=1,
        nodes="1:4",
        gates=[5],
        steps=[("at gate 5", "SIGKILL", 3), ("agent 3 ended", "SIGKILL", 1), ("agent 1 ended", "open", 5)],
    ).run()
    assert ended.codes == {"0": 0, "1": -9, "2": 0, "3": -9}
    assert [choice.split(":")[0] for choice in ended.choices] == ["2 of 2 GPUs"]
    assert [sorted(ended.losses(start)) for start in (0, 1)] == [[1, 2, 3, 4, 5], [5, 6, 7, 8]]
    assert_same_optimizer(ended.dump(0, "after_save_0000004"), ended.dump(1, "after_load"))
    assert ended.left == []


def test_gpus_with_which_no_layout_keeps_the_batch_wait(tmp_path: Path) -> None:
    """Two data-parallel ranks cannot share a batch of 3; a model of one layer and one head has no other division."""
    one = ["--num-layers", "1", "--num-attention-heads", "1", "--global-batch-size", "3"]
    ended = Scenario(
        tmp_path,
        elastic_arguments(tmp_path, 1, 1, more=one),
        agents=3,
        ranks=1,
        nodes="1:3",
        gates=[5],
        steps=[("at gate 5", "SIGKILL", 2), ("agent 2 ended", "open", 5)],
    ).run()
    assert ended.codes == {"0": 0, "1": 0, "2": -9}
    assert ended.choices == ["1 of 2 GPUs: TP1 x PP1 x DP1; global batch 3 kept; 1 GPU waits"]
    assert [sorted(ended.losses(start)) for start in (0, 1)] == [[1, 2, 3, 4, 5], [5, 6, 7, 8]]
    assert ended.left == []


def test_every_rank_ends_with_the_reason_if_no_layout_keeps_the_training(tmp_path: Path) -> None:
    """Context parallelism of 4 is kept, and there are two ranks. torchrun prints the reason at its end.

    The workers are new processes: torch itself writes down what ends a worker that it has forked.
    """
    ended = Scenario(
        tmp_path,
        elastic_arguments(tmp_path, 1, 1, more=["--context-parallel-size", "4"]),
        ranks=1,
        nodes="2:2",
        max_restarts=0,
        forks=False,
    ).run()
    assert ended.codes == {"0": 1, "1": 1}
    for agent in ("0", "1"):
        printed = [line for line in ended.output.splitlines() if f"[agent {agent}]" in line]
        end = next(number for number, line in enumerate(printed) if "agent ends: ChildFailedError" in line)
        assert any("no layout of 2 GPUs keeps the training" in line for line in printed[end:])
    assert not (tmp_path / "checkpoints").exists()
    assert ended.left == []
