"""Tests published configurations: accepted, with an exact round trip to torch_dist, and unchanged keys.

This is a sample with one configuration for each model type; `tests/slow/test_published.py` has all.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.hugging_face.model import described_model
from tests.harness.published_configs import ACCEPTED, FOLDER, REFUSED, WITHOUT_CLASS, assert_round_trip, configuration

_TYPES = {json.loads((FOLDER / f"{name}.json").read_text())["model_type"]: name for name in ACCEPTED}
SAMPLE = {kind: name for kind, name in _TYPES.items() if kind not in WITHOUT_CLASS}  # others: test_own_code.py


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAMPLE.values())
def test_there_and_back(name: str, tmp_path: Path) -> None:
    assert_round_trip(name, tmp_path)


@pytest.mark.parametrize(("name", "key"), REFUSED.items())
def test_keys_of_a_class_that_megatron_lacks_are_refused(name: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configuration(name)))
    with pytest.raises(UnsupportedCheckpointError, match=key):
        described_model(tmp_path)
