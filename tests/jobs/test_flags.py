"""Flags of Megatron's that stand beside a resume under another layout: what they ask for is had, or told."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import OFF, differing, resume, run_job, train_and_save
from tests.harness.layouts import Layout


@pytest.mark.parametrize("target", [Layout(1, 1, 4), Layout(2, 1, 8)], ids=["more ranks", "TP2, too"])
def test_random_states_of_more_data_parallel_ranks(target: Layout, tmp_path: Path) -> None:
    """Each rank asks for its own, and there are two: stock ends by IndexError, once the weights are loaded."""
    flag = ["--data-parallel-random-init"]
    saved = train_and_save(tmp_path / "saved", Layout(1, 1, 2), more=flag)
    if target.tensor == 1:
        stock = run_job(tmp_path / "stock", target, load=saved.run, more=flag, environment=OFF)
        assert "IndexError" in stock.output
    resumed = resume(tmp_path / "resumed", target, saved.run, more=flag)
    assert "random state starts anew" in resumed.output
    assert differing(assemble(saved.at_save), assemble(resumed.at_load)) == []


def test_everything_stored_must_be_asked_for(tmp_path: Path) -> None:
    """Megatron is not asked for the optimizer, which this package fills."""
    source = fixture_named("p01")
    job = resume(tmp_path, Layout(2, 2, 4), source.run, more=["--dist-ckpt-strictness", "raise_all"])
    assert differing(source.truth, assemble(job.at_load)) == []
