"""Checkpoints seen otherwise than they are stored: under other names, with other weights, without optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext import TorchDist, convert
from tests.harness.checkpoints import fixture_named


@pytest.mark.parametrize("spec", ["transformer_engine", "local"])
def test_weights_made_of_masters_prove_nothing_under_either_layer_spec(spec: str, tmp_path: Path) -> None:
    run = fixture_named("p50").run
    report = convert(run, tmp_path / "out", TorchDist(transformer_impl=spec))
    assert report.proven_elements == convert(run, tmp_path / "as it is", TorchDist()).proven_elements == 0
