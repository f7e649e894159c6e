"""Marks rows of tests of all stored checkpoints or model families that only `--nightly` runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.harness.checkpoints import FIXTURES

# A test of more checkpoints or families than the first number keeps every eighth with `--quick` and in the test
# command: neighbors are alike.
_FEW = _KEPT = 8
_CHECKPOINTS = {form for name in FIXTURES for form in (name, name.partition("_")[0])}


def mark_rows(items: Iterable[pytest.Item]) -> None:
    """Mark the rows that a run leaves out; of each test it keeps some."""
    tests: defaultdict[str, dict[str, list[pytest.Item]]] = defaultdict(dict)
    for item in items:
        for name in _subjects(item):
            tests[item.nodeid.partition("[")[0]].setdefault(name, []).append(item)
    for rows in tests.values():
        if len(rows) <= _FEW:
            continue
        for number, own in enumerate(rows.values()):
            for row in own if number % _KEPT else ():
                row.add_marker("thorough")
                row.add_marker("nightly")


def _subjects(item: pytest.Item) -> Iterable[str]:
    """Return the checkpoint or the model family of a row."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    of_family = "/huggingface/" in item.nodeid
    for parameter, value in parameters.items():
        if isinstance(value, str) and (value in _CHECKPOINTS or (of_family and parameter == "name")):
            return [value]
    return []
