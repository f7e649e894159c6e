"""Test loads by Megatron Core itself, without process groups; `tests/jobs/test_own_loops.py` has those with ranks."""

from __future__ import annotations

import megatron.core
import pytest
from megatron.core import dist_checkpointing

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.megatron.core_load import wrap_load
from tests.harness.checkpoints import fixture_named


def test_an_earlier_megatron_is_told_how_to_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.19 it ends with an error about `common.pt`, which p10 lacks."""
    monkeypatch.setattr(megatron.core, "__version__", "0.16.1")
    folder = fixture_named("p10").iteration
    with pytest.raises(UnsupportedCheckpointError, match="later release") as caught:
        wrap_load(dist_checkpointing.load)({}, str(folder))
    assert caught.value.details["hint"].endswith(f"{folder} OUTPUT --to torch_dist --megatron-version 0.16")
