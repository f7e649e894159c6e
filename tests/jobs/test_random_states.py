"""Test the random states of genuine jobs with dropout: restored, or begun anew from `--seed` and the iteration."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mcore_ckpt_ext.megatron.random_seed import seed_at
from tests.harness.jobs import RANK_SCRIPTS, SAVED
from tests.harness.layouts import Layout
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

_LATER = 6
_DP4, _TP2, _STAGES = Layout(1, 1, 4), Layout(2, 1, 4), Layout(1, 2, 4)
_DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
_SEED = 1234  # Megatron's default


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A job that saves twice, and resumes from both under other layouts, by this package's rule and by stock's."""
    folder = tmp_path_factory.mktemp("random_states")
    run = folder / "saved" / "checkpoints"

    def turn(name: str, layout: Layout, *more: str, load: bool = True, **options: Any) -> Turn:
        return Turn(folder / name, layout, load=run if load else None, more=[*_DROPOUT, *more], **options)

    later = ["--ckpt-step", str(_LATER)]
    as_stock = {"environment": {"MCORE_CKPT_EXT_RANDOM_STATES": "stock"}}
    turns = [
        turn("saved", _DP4, load=False, saves=True, until=_LATER),
        turn("unchanged", _DP4, until=_LATER),
        turn("at 4", _TP2),
        turn("at 6", _TP2, *later, until=_LATER + 1),
        turn("stages", _STAGES),
        turn("not loaded", _TP2, "--no-load-rng"),
        turn("stock at 4", _TP2, **as_stock),
        turn("stock at 6", _TP2, *later, until=_LATER + 1, **as_stock),
        turn("without", _DP4, until=_LATER, stock=True),
    ]
    return run_in_turn(folder, turns, [RANK_SCRIPTS / "record_seeds.py"])


def _states(results: Results, name: str) -> list[tuple[int, int]]:
    """Seed and digest of each rank."""
    found = re.findall(r"\[rank (\d)\] random state: seed (\d+), digest (\d+)", results.job(name).output)
    return [(int(seed), int(digest)) for _, seed, digest in sorted(found)]


def test_an_unchanged_layout_goes_on_as_without_this_package(results: Results) -> None:
    assert _states(results, "unchanged") == _states(results, "without")
    assert results.job("unchanged").losses == results.job("without").losses
    assert "random state is reinitialized" not in results.job("unchanged").output


def test_each_iteration_begins_with_a_seed_of_its_own(results: Results) -> None:
    for name, iteration in [("at 4", SAVED), ("at 6", _LATER)]:
        assert [seed for seed, _ in _states(results, name)] == [seed_at(_SEED, iteration)] * 4
    first, second = (seed_at(_SEED, SAVED) + 100 * stage for stage in range(2))
    assert [seed for seed, _ in _states(results, "stages")] == [first, first, second, second]


def test_the_summary_says_it(results: Results) -> None:
    said = "random state is reinitialized from --seed and iteration"
    assert f"{said} {SAVED};" in results.job("at 4").summary.string
    assert f"{said} {_LATER};" in results.job("at 6").summary.string
    assert "reinitialized, as in stock Megatron on a changed layout;" in results.job("stock at 4").summary.string
    assert "reinitialized: --no-load-rng;" in results.job("not loaded").summary.string


def test_by_the_rule_of_stock_each_restart_draws_the_same(results: Results) -> None:
    assert _states(results, "stock at 4") == _states(results, "stock at 6")
    assert [seed for seed, _ in _states(results, "stock at 4")] == [_SEED] * 4
    assert _states(results, "not loaded") == _states(results, "stock at 4")
    assert results.job("at 4").losses[SAVED + 1] != results.job("stock at 4").losses[SAVED + 1]
