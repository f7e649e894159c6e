"""Test the shards of a model's parameters."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_parameters import Cut, newest_cuts

TOWER = "vision_model.decoder.layers.0.mlp"


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(("rows", "bands"), [(64, 1), (128, 2)])
def test_a_tower_has_gates_of_its_own(is_gated: bool, rows: int, bands: int) -> None:
    """The arguments say whether the language model has them."""
    shapes = {f"{TOWER}.linear_fc1.weight": (rows, 16), f"{TOWER}.linear_fc2.weight": (16, 64)}
    cut_of = newest_cuts(shapes, JobArguments.of({"swiglu": is_gated}))
    assert cut_of(f"{TOWER}.linear_fc1.weight") == Cut(0, bands)
    assert cut_of(f"{TOWER}.linear_fc2.weight") == Cut(1)


@pytest.mark.parametrize(("is_gated", "bands"), [(True, 2), (False, 1)])
def test_the_arguments_decide_for_the_language_model(is_gated: bool, bands: int) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert newest_cuts({name: (64, 16)}, JobArguments.of({"swiglu": is_gated}))(name) == Cut(0, bands)
