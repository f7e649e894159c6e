"""Train twelve iterations in one go, and as four under each of three layouts, in fp32: the same but for rounding.

TEST_FEATURES names features of `scripts/same_training.py`, for a part.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from same_training import FEATURES, PLUGINS, largest_difference

from tests.harness.layouts import SEQUENCE, Layout
from tests.harness.turns import Turn, run_in_turn

_EVERY, _LAST = 4, 12
# Features that compute something else under the layouts below, and Muon, whose iteration in bf16 amplifies rounding.
_OTHERS = {
    "experts, global_aux_loss", "experts, sinkhorn", "experts, capacity factor 0.5", "Muon, blockwise",
    "experts, aux_loss, per token", "attention sinks alone",
}  # fmt: skip
_LARGEST = {"Muon, duplicated": 1e-3, "Muon, distributed": 1e-3}
_ROUNDING = 1e-6
NAMES = os.environ.get("TEST_FEATURES", "").split(";") if "TEST_FEATURES" in os.environ else sorted(FEATURES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in _OTHERS])
def test_training_there_and_back_is_training_in_one_go(name: str, tmp_path: Path) -> None:
    feature = [*FEATURES[name].split(), "--micro-batch-size", "1"]
    optimizer = () if "--optimizer" in feature else ("--use-distributed-optimizer",)
    old, new = Layout(1, 1, 8), Layout(2, 2, 8, more=SEQUENCE)

    def turn(label: str, layout: Layout, until: int, load: str = "") -> Turn:
        return Turn(
            tmp_path / label, layout, load=tmp_path / load / "checkpoints" if load else None, saves=True, until=until,
            newest=until, precision=(), optimizer=optimizer,
            more=[*feature, "--train-iters", str(_LAST), "--ckpt-fully-parallel-save"],
        )  # fmt: skip

    results = run_in_turn(
        tmp_path,
        [
            turn("alone", old, _LAST),
            turn("first", old, _EVERY),
            turn("there", new, 2 * _EVERY, "first"),
            turn("back", old, _LAST, "there"),
        ],
        PLUGINS,
    )
    alone, back = (results.job(label).folder / "losses.json" for label in ("alone", "back"))
    assert set(json.loads(back.read_text())) == {str(step) for step in range(2 * _EVERY + 1, _LAST + 1)}
    difference = largest_difference(alone, back)
    assert difference < _LARGEST.get(name, _ROUNDING)
    print(name, f"{difference:.1e}")
