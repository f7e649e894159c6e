"""More of jobs that go on by themselves: a drained node, the death of one that waits."""

from __future__ import annotations

from pathlib import Path

from megatron_on_cpu.elastic_jobs import Scenario

from tests.harness.elastic import elastic_arguments
from tests.harness.jobs import assert_same_optimizer


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
