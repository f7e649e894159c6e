"""Test what stored state says of stock Megatron's failures; tests/jobs/test_stock_errors.py has genuine ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.operations.stored_failures import stock_failure
from mcore_ckpt_ext.optimizers.stock_failures import FP32_IN_PLACE, StockFailure
from tests.harness.checkpoints import fixture_named


@pytest.mark.parametrize(
    ("name", "bf16", "failure"),
    [("p01", True, None), ("p01", False, FP32_IN_PLACE), ("p41", False, None), ("p05", False, None)],
)
def test_fp32_parameters_are_not_copied_in_place(
    name: str, bf16: bool, failure: StockFailure | None, tmp_path: Path
) -> None:
    """Arrays with names are loaded otherwise, and so are optimizers that are not distributed."""
    folder = fixture_named(name).copy_to(tmp_path / "copy").iteration
    if (folder / "common.pt").exists():
        state = torch.load(folder / "common.pt", weights_only=False)
        state["args"].bf16 = bf16
        torch.save(state, folder / "common.pt")
    assert stock_failure(open_checkpoint(folder)) is failure
