"""Test optimizers that were saved before their first step: which they are, and what the step makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt_ext.optimizers.first_step import counts_no_step, lack_first_moments, moments_of, with_step_zero

ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
LION: dict[str, Any] = {"betas": (0.9, 0.95)}
MUON: dict[str, Any] = {"momentum": 0.95}


@pytest.mark.parametrize(("schedule", "counts_none"), [
    ({"num_steps": 0}, True), ({"num_steps": 8}, False), ({}, False), (None, False),
])  # fmt: skip
def test_the_scheduler_counts_successful_steps(schedule: object, counts_none: bool) -> None:
    assert counts_no_step(schedule) is counts_none


@pytest.mark.parametrize(("groups", "moments"), [
    ([ADAM, ADAM], ("exp_avg", "exp_avg_sq")),
    ([LION], ("exp_avg",)),
    ([MUON], ("momentum_buffer",)),
    ([ADAM, LION], ()),
    ([{"momentum": 0}], ()),
    ([], ()),
])  # fmt: skip
def test_the_moments_after_a_step_follow_from_the_groups(
    groups: list[dict[str, Any]], moments: tuple[str, ...]
) -> None:
    assert moments_of(groups) == moments
    assert lack_first_moments(groups) is bool(moments)
    assert not lack_first_moments([*groups, {**ADAM, "step": 1}])


def test_only_adam_counts_its_steps() -> None:
    assert with_step_zero([ADAM, {**ADAM, "step": 8}, LION, MUON]) == [
        {**ADAM, "step": 0},
        {**ADAM, "step": 0},
        LION,
        MUON,
    ]
