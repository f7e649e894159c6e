"""Test reading the formats with flattened keys: every element equals the live state of the job."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext import open_checkpoint
from tests.harness.checkpoints import assert_is_the_truth, fixture_named


@pytest.mark.parametrize(("fixture", "name"), [("p50", "fsdp_dtensor"), ("p51", "torch_dcp")])
def test_everything_equals_the_truth(fixture: str, name: str) -> None:
    checkpoint = open_checkpoint(fixture_named(fixture).run)
    assert_is_the_truth(checkpoint, fixture_named(fixture))
    groups = checkpoint.optimizer.param_groups()
    assert [(group["wd_mult"], group["step"]) for group in groups] == [(1.0, 4), (0.0, 4)]
    assert (checkpoint.job.iteration(), str(checkpoint.job.layout), checkpoint.format.name) == (
        4,
        "TP1 x PP1 x DP4",
        name,
    )
    assert {item.key: item.carried for item in checkpoint.files.unread()} == {"rng_state": False}
