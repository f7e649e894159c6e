"""Test the settings of parameter groups that a conversion writes: none is left out."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt_ext.formats.portable_state import distinct_groups

DECAYING: dict[str, Any] = {"lr": 0.1, "wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
OTHER = {**DECAYING, "wd_mult": 0.0}


def mark(of_experts: bool, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**group, "is_expert_parallel": of_experts} for group in groups]


@pytest.mark.parametrize("dense", [(), (OTHER,), (DECAYING, OTHER)])
@pytest.mark.parametrize("experts", [(), (OTHER,), (DECAYING, OTHER)])
def test_no_group_is_left_out(dense: tuple[dict[str, Any], ...], experts: tuple[dict[str, Any], ...]) -> None:
    """A job without expert parallelism has one optimizer; a writer may mark all groups as those of experts."""
    groups = [*mark(False, *dense), *mark(True, *experts)]
    settings = [group for group in (DECAYING, OTHER) if group in (*dense, *experts)]
    (single,) = distinct_groups(groups, has_expert_optimizer=False)
    assert sorted(single, key=repr) == sorted(mark(False, *settings), key=repr)
    of_dense, of_experts = distinct_groups(groups, has_expert_optimizer=True)
    assert of_dense == mark(False, *(dense or experts))
    assert of_experts == mark(True, *(experts or dense))
