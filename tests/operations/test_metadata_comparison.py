"""Test the values of parameter groups that a comparison shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mcore_ckpt_ext.operations.metadata_comparison import _settings


def test_distinct_values_of_the_groups_that_have_a_setting() -> None:
    groups = [{"betas": (0.9, 0.95)}, {"betas": (0.8, 0.95)}, {"betas": (0.9, 0.95)}, {}]
    checkpoint: Any = SimpleNamespace(optimizer=SimpleNamespace(param_groups=lambda: groups))
    assert _settings(checkpoint, "betas") == "(0.8, 0.95), (0.9, 0.95)"
    assert _settings(checkpoint, "eps") == "none"
