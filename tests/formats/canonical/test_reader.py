"""Test the reader of canonical folders where conversions do not reach it."""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt_ext import Canonical, convert, open_checkpoint
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from tests.harness.checkpoints import fixture_named


def test_a_tensor_that_is_not_there_has_no_slices(tmp_path: Path) -> None:
    convert(fixture_named("p10").run, tmp_path / "out", Canonical())
    found = open_checkpoint(tmp_path / "out")
    name = found.names(WEIGHT)[0]
    for kind, absent in ((WEIGHT, "absent"), ("exp_avg", "absent"), ("momentum_buffer", name)):
        assert found.stored_slices(kind, absent) == []
        assert found.logical_tensor(kind, absent) is None
    assert len(found.stored_slices("exp_avg", name)) == 1
