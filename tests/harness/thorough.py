"""Marks most rows of tests of all stored checkpoints or model families as `thorough`, which `--quick` leaves out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.harness.checkpoints import FIXTURES

# A test of more checkpoints or families than the first number keeps every fourth with `--quick`: neighbors are alike.
_FEW, _STEP = 8, 4
_CHECKPOINTS = {form for name in FIXTURES for form in (name, name.partition("_")[0])}


def mark_rows(items: Iterable[pytest.Item]) -> None:
    """Mark the rows that a quick run leaves out; of each test it keeps some."""
    tests: defaultdict[str, dict[str, list[pytest.Item]]] = defaultdict(dict)
    for item in items:
        for name in _subjects(item):
            tests[item.nodeid.partition("[")[0]].setdefault(name, []).append(item)
    for rows in tests.values():
        left_out = [row for number, own in enumerate(rows.values()) if number % _STEP for row in own]
        for row in left_out if len(rows) > _FEW else ():
            row.add_marker(pytest.mark.thorough)


def _subjects(item: pytest.Item) -> Iterable[str]:
    """Return the checkpoint or the model family of a row."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    of_family = "/huggingface/" in item.nodeid
    for parameter, value in parameters.items():
        if isinstance(value, str) and (value in _CHECKPOINTS or (of_family and parameter == "name")):
            return [value]
    return []
