"""Test a sample of what training computes otherwise under another layout, with genuine jobs in fp32.

`scripts/same_training.py` measures all of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from same_training import BALANCED, largest_difference

from mcore_ckpt_ext.continuity.mathematics import SAME_TRAINING
from tests.harness.jobs import SAVED
from tests.harness.layouts import SEQUENCE, Layout
from tests.harness.turns import Results, Turn, run_in_turn

_ROUNDING = 1e-6
_DP4, _TP2 = Layout(1, 1, 4), Layout(2, 1, 4, more=SEQUENCE)
_ONE, _TWO = ("--micro-batch-size", "1"), ("--micro-batch-size", "2")
_AUX = (*BALANCED.split(), "--moe-router-load-balancing-type", "aux_loss")
_GLOBAL = (*BALANCED.split(), "--moe-router-load-balancing-type", "global_aux_loss")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Experts that are balanced in two ways, resumed under their own layout and under others."""
    folder = tmp_path_factory.mktemp("same_training")

    def turn(name: str, layout: Layout, feature: tuple[str, ...], *more: str, load: str = "") -> Turn:
        run = folder / load / "checkpoints" if load else None
        until = SAVED + 1 if load else SAVED
        return Turn(folder / name, layout, load=run, saves=not load, until=until, precision=(), more=[*feature, *more])

    turns = [
        turn("aux", _DP4, _AUX, *_ONE),
        turn("aux, same", _DP4, _AUX, *_ONE, load="aux"),
        turn("aux, TP2", _TP2, _AUX, *_ONE, load="aux"),
        turn("aux, micro batch", _DP4, _AUX, *_TWO, load="aux"),
        turn("aux, epsilon", _TP2, _AUX, *_ONE, "--norm-epsilon", "1e-3", load="aux"),
        turn("global", _DP4, _GLOBAL, *_ONE),
        turn("global, same", _DP4, _GLOBAL, *_ONE, load="global"),
        turn("global, TP2", _TP2, _GLOBAL, *_ONE, load="global"),
    ]
    return run_in_turn(folder, turns)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("base", "name", "is_same"),
    [("aux", "TP2", True), ("aux", "micro batch", False), ("global", "TP2", False)],
)
def test_the_computation_differs_where_the_table_says_so(results: Results, base: str, name: str, is_same: bool) -> None:
    same, other = (results.folder(f"{base}, {one}") / "losses.json" for one in ("same", name))
    difference = largest_difference(same, other)
    assert (difference < _ROUNDING) is is_same, difference
    assert is_same or difference > 20 * _ROUNDING


@pytest.mark.nightly
def test_the_summary_says_it(results: Results) -> None:
    assert results.job("aux, TP2").summary.string.endswith(f"; {SAME_TRAINING}")
    other = "; other arguments of the model: layernorm_epsilon 1e-05, now 0.001; apart from them: "
    assert results.job("aux, epsilon").summary.string.endswith(f"{other}{SAME_TRAINING}")
    said = results.job("global, TP2").summary.string
    assert "; not the same training: --moe-router-load-balancing-type global_aux_loss: each micro batch is" in said


def test_a_job_is_not_compared_with_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compared with itself"):
        largest_difference(tmp_path / "losses.json", tmp_path / "losses.json")


def test_numbers_that_are_not_finite_are_no_difference_of_zero(tmp_path: Path) -> None:
    for name, loss in (("one", 1.0), ("other", float("nan"))):
        (tmp_path / name).write_text(json.dumps({"5": {"grad_norm": 1.0, "lm loss": loss}}))
    with pytest.raises(ValueError, match="not finite"):
        largest_difference(tmp_path / "one", tmp_path / "other")
