"""Tests for which optimizer of a chain each parameter is written, by release: real checkpoints of Muon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt_ext import TorchDist, convert, open_checkpoint
from mcore_ckpt_ext.formats.portable_state import SHARDING_MARK
from mcore_ckpt_ext.formats.torch_dist.chained_optimizers import ChainedOptimizers
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from tests.harness.checkpoints import everything_in, fixture_named
from tests.harness.jobs import differing


@pytest.mark.parametrize(
    ("fixture", "release", "distributed"),
    [
        # A layer-wise optimizer; in the development head, a DistributedOptimizer steps the parameters that Muon does
        # not.
        ("p44", "0.20.0", True),
        ("p44", "0.19.2", False),
        ("p44", "0.16.1", False),
        # Nothing is distributed in this job, in any release.
        ("p43", "0.20.0", False),
    ],
)
def test_the_optimizer_beside_muon_is_written_in_the_form_of_the_release(
    fixture: str, release: str, distributed: bool, tmp_path: Path
) -> None:
    source = fixture_named(fixture)
    report = convert(source.run, tmp_path / "out", TorchDist(megatron_version=release))
    written = open_checkpoint(tmp_path / "out")
    by_muon, by_adam = written.names("momentum_buffer"), written.names("exp_avg_sq")
    assert by_muon and by_adam
    assert not any(written.optimizer.state().is_distributed(name) for name in by_muon)
    assert {written.optimizer.state().is_distributed(name) for name in by_adam} == {distributed}
    # Stock Megatron matches entries by position: the layer-wise optimizer comes first.
    assert [SHARDING_MARK in child for child in written.optimizer.chained_optimizer_settings()] == [False, distributed]
    assert any("written as a separate DistributedOptimizer" in note for note in report.notes) == distributed
    assert differing(source.truth, everything_in(written)) == []


def test_a_job_without_the_layout_keeps_its_optimizer_whole() -> None:
    """The source's arguments have `--no-use-layer-wise-param-layout`."""
    source = open_checkpoint(fixture_named("p44").run)
    for layout, split in ((True, [False, True]), (False, [False, False])):
        arguments = source.job.arguments().replace(use_layer_wise_param_layout=layout)
        chain = ChainedOptimizers(_with(source, arguments), (0, 20), has_expert_optimizer=False)
        assert [SHARDING_MARK in child for child in chain.entries("fully_reshardable")] == split


def _with(source: CheckpointView, arguments: JobArguments) -> CheckpointView:
    return replace(source, job=replace(source.job, arguments=lambda: arguments))
