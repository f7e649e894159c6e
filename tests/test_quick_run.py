"""Tests what a quick run leaves out (`tests/harness/thorough.py`)."""

from __future__ import annotations

from collections import defaultdict

import pytest


def is_left_out_as_a_whole(item: pytest.Item) -> bool:
    """Return whether the test of an item, its class or its module is marked, and not the row alone."""
    is_above = any(node is not item for node, _ in item.iter_markers_with_node("thorough"))
    return is_above or any(mark.name == "thorough" for mark in getattr(getattr(item, "obj", None), "pytestmark", ()))


def test_every_test_keeps_a_row(request: pytest.FixtureRequest) -> None:
    """Of the tests in this run, so that only a run of all tests shows it for all."""
    kept: defaultdict[str, int] = defaultdict(int)
    for item in request.session.items:
        if not is_left_out_as_a_whole(item):
            kept[item.nodeid.partition("[")[0]] += item.get_closest_marker("thorough") is None
    assert [test for test, rows in kept.items() if not rows] == []
