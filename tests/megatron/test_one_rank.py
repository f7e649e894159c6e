"""Test a job of genuine Megatron-LM on one rank, from the load to the save; `tests/jobs` has those of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import MOMENTS_VARIABLE, assemble

from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import SAVED, differing, resume
from tests.harness.layouts import Layout


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
