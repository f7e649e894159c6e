"""Test what ColossalAI's plugins compute otherwise under another layout; `same_training_colossalai.py` measures all."""

from __future__ import annotations

from pathlib import Path

import pytest
from same_training_colossalai import FEATURES, LAYOUTS, OLD, largest_difference, run

pytestmark = pytest.mark.nightly

CASES = {
    ("Gemini", "TP 2"): True,
    ("Gemini, clipping", "DP 4 to 2"): True,
    ("Gemini, clipping", "TP 2"): False,
    ("LowLevelZero, clipping", "DP 4 to 2"): True,
    ("HybridParallel", "TP 2"): True,
    ("HybridParallel, clipping", "TP 2"): False,
    ("HybridParallel, clipping", "PP 2"): True,
    ("HybridParallel, masked losses", "DP 4 to 2"): False,
    ("HybridParallel, masked losses", "PP 2"): True,
}
"""Features under a layout, and whether they then compute the same; PP 2 has micro batches of the old size."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each feature, under the old layout."""
    folders = {name: tmp_path_factory.mktemp("saved") for name, _ in CASES}
    for name, folder in folders.items():
        run(FEATURES[name], OLD, folder, saves=True)
    return folders


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_computation_differs_where_the_documentation_says_so(
    saved: dict[str, Path], name: str, layout: str
) -> None:
    feature = FEATURES[name]
    same, other = (run(feature, sizes, saved[name], saves=False) for sizes in (OLD, LAYOUTS[layout]))
    difference = largest_difference(same, other)
    assert (difference < feature.rounding) is CASES[name, layout], difference
