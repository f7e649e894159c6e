"""Test a job of genuine Megatron-LM on one rank, from the load to the save; `tests/jobs` has those of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import MOMENTS_VARIABLE, assemble

import mcore_ckpt_ext
from mcore_ckpt_ext.formats import registry
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import RANK_SCRIPTS, SAVED, differing, resume
from tests.harness.layouts import Layout
from tests.harness.ranks.own_format import Own, own_format


@pytest.mark.parametrize(("name", "model"), [
    ("p01", ()),
    ("p33", ("--num-layers", "2", "--swiglu")),  # zarr, which 0.19.2 has no reader for
])  # fmt: skip
def test_a_checkpoint_of_several_ranks_is_resumed_and_saved(name: str, model: tuple[str, ...], tmp_path: Path) -> None:
    fixture = fixture_named(name)
    job = resume(
        tmp_path, Layout(1, 1, 1, vocabulary=fixture.job["args"]["padded_vocab_size"]), fixture.run, saves=True,
        more=[*model, "--use-dist-ckpt", "--async-save"], environment={MOMENTS_VARIABLE: "load"},
    )  # fmt: skip
    assert differing(fixture.truth, assemble(job.at_load)) == []
    assert job.summary["target"] == "TP1 x PP1 x DP1"
    assert (job.run / f"iter_{SAVED + 1:07d}" / FILE_NAME).is_file()


def test_a_container_format_of_ones_own_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in the list of formats suffices: Megatron gets the weights as those of a legacy checkpoint."""
    monkeypatch.setattr(registry, "FORMATS", (own_format(Own.__module__), *registry.FORMATS))
    fixture, run = fixture_named("p01"), tmp_path / "run"
    mcore_ckpt_ext.convert(fixture.run, run / "iter_0000004", Own())
    (run / "latest_checkpointed_iteration.txt").write_text("4")
    job = resume(
        tmp_path / "job", Layout(1, 1, 1, vocabulary=fixture.job["args"]["padded_vocab_size"]), run,
        plugins=[RANK_SCRIPTS / "own_format.py"], environment={MOMENTS_VARIABLE: "load"},
    )  # fmt: skip
    assert differing(fixture.truth, assemble(job.at_load)) == []
    assert job.summary["target"] == "TP1 x PP1 x DP1"
