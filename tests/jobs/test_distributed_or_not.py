"""Genuine Megatron-LM 0.19.2 with and without --use-distributed-optimizer: the option is switched between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.jobs import SAVED, assert_same_optimizer, assert_same_training_state, resume, train_and_save
from tests.harness.layouts import Layout

DISTRIBUTED, WHOLE = ("--use-distributed-optimizer",), ()


@pytest.mark.parametrize(
    ("before", "after", "precision"),
    [(WHOLE, DISTRIBUTED, ("--bf16",)), (DISTRIBUTED, WHOLE, ("--bf16",)), (DISTRIBUTED, WHOLE, ())],
    ids=["switched on", "switched off", "switched off in fp32"],
)
def test_the_option_may_change_with_or_without_the_layout(
    before: Sequence[str], after: Sequence[str], precision: Sequence[str], tmp_path: Path
) -> None:
    saved = train_and_save(
        tmp_path / "saved", Layout(1, 2, 4), optimizer=before, precision=precision, until=SAVED + 1
    )
    for layout in (Layout(1, 2, 4), Layout(2, 1, 2)):
        folder = tmp_path / f"resumed as {layout}"
        resumed = resume(folder, layout, saved.run, optimizer=after, precision=precision)
        assert_same_optimizer(saved.at_save, resumed.at_load)
        assert_same_training_state(saved.at_save, resumed.at_load)
        assert resumed.losses[SAVED + 1] == pytest.approx(saved.losses[SAVED + 1], rel=1e-4)
