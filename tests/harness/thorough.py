"""Marks rows that only `--nightly` runs, and rows that `--quick` leaves out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.harness.checkpoints import FIXTURES

# A test of more checkpoints or families than the first number keeps every eighth with `--quick` and in the test
# command: neighbors are alike.
_FEW = _KEPT = 8
# A `thorough` test of more than two rows keeps every third in these folders, where a row takes seconds.
_FEW_THOROUGH, _KEPT_THOROUGH = 2, 3
# `--quick` has every second row of other tests with more rows than these in the same folders.
_FEW_QUICK = 3
_OF_SECONDS = tuple(
    f"tests/{folder}/" for folder in ("cli", "colossalai", "formats", "huggingface", "megatron/sources", "operations")
)
_CHECKPOINTS = {form for name in FIXTURES for form in (name, name.partition("_")[0])}


def mark_rows(items: Sequence[pytest.Item]) -> None:
    """Mark the rows that a run leaves out; of each test it keeps some."""
    _mark_subjects(items)
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.nodeid.startswith(_OF_SECONDS) and _parameters(item) and not item.get_closest_marker("nightly"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for rows in tests.values():
        if len(rows) > _FEW_THOROUGH and all(row.get_closest_marker("thorough") for row in rows):
            for number, row in enumerate(rows):
                if number % _KEPT_THOROUGH:
                    row.add_marker("nightly")
        quick = [row for row in rows if not row.get_closest_marker("thorough")]
        for row in quick[1::2] if len(quick) > _FEW_QUICK else ():
            row.add_marker("thorough")


def _mark_subjects(items: Sequence[pytest.Item]) -> None:
    tests: defaultdict[str, dict[str, list[pytest.Item]]] = defaultdict(dict)
    for item in items:
        if subject := _subject(item):
            tests[item.nodeid.partition("[")[0]].setdefault(subject, []).append(item)
    for rows in tests.values():
        if len(rows) <= _FEW:
            continue
        for number, own in enumerate(rows.values()):
            for row in own if number % _KEPT else ():
                row.add_marker("thorough")
                row.add_marker("nightly")


def _subject(item: pytest.Item) -> str | None:
    """Return the checkpoint or the model family of a row; a job of many rows costs little more than of a few."""
    if "/jobs/" in item.nodeid:
        return None
    of_family = "/huggingface/" in item.nodeid
    for parameter, value in _parameters(item).items():
        if isinstance(value, str) and (value in _CHECKPOINTS or (of_family and parameter == "name")):
            return value
    return None


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    """Return the values of a row by parameter; none for a test that is no row."""
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def rows_of_run(request: pytest.FixtureRequest, *parameters: str) -> set[tuple[Any, ...]]:
    """Return the values of some parameters in the rows of a fixture's module that this run has."""
    rows = [_parameters(item) for item in request.session.items if item.path == request.path]
    return {tuple(row[name] for name in parameters) for row in rows if row.keys() >= set(parameters)}
