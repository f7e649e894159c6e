"""Test which parameters of a Megatron-FSDP checkpoint are refused for the order of their rows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.fsdp.reader import FsdpCheckpoint
from tests.harness.checkpoints import fixture_named

FIRST_LINEAR = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize(("arguments", "is_refused"), [
    ({"tensor_model_parallel_size": 2, "quick_geglu": True}, True),
    ({"tensor_model_parallel_size": 1, "quick_geglu": True}, False),
    ({"tensor_model_parallel_size": 2, "swiglu": True, "gated_linear_unit": True}, False),
    ({"tensor_model_parallel_size": 2}, False),
])  # fmt: skip
def test_gated_rows_in_turn_by_rank_are_refused(arguments: dict[str, Any], is_refused: bool) -> None:
    opened = open_checkpoint(fixture_named("p50").run)
    reader: Any = opened.format.reader
    assert isinstance(reader, FsdpCheckpoint)
    reader.__dict__["recorded_arguments"] = reader.recorded_arguments.replace(**arguments)
    for key, refused in ((FIRST_LINEAR, is_refused), (FIRST_LINEAR.replace("fc1", "fc2"), False)):
        with pytest.raises(UnsupportedCheckpointError, match="in turn") if refused else nullcontext():
            reader._check_order(key)
