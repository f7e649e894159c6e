"""Test conversions of each kind, killed at fifty random moments and continued; run by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.kills import KINDS, assert_survives_kills

KILLS = 50


@pytest.mark.parametrize(("fixture", "to"), KINDS)
def test_killed_at_random_moments(fixture: str, to: str, tmp_path: Path) -> None:
    assert_survives_kills(KILLS, fixture, to, tmp_path)
