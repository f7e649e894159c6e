"""Convert all published configurations to torch_dist and back; `tests/huggingface` has a sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.published_configs import ACCEPTED, assert_round_trip


@pytest.mark.parametrize("name", ACCEPTED)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    assert_round_trip(name, tmp_path)
