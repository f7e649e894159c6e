"""Test where parameters outside the decoder layers lie."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout_choice.local_columns import AFTER_LAYERS
from mcore_ckpt_ext.layout_choice.model_table import place_after_layers


@pytest.mark.parametrize(("name", "mtp_layers", "place"), [
    ("decoder.final_layernorm.weight", 1, 7),
    ("decoder.final_layernorm.weight", None, AFTER_LAYERS),
    ("output_layer.weight", 1, AFTER_LAYERS),
])  # fmt: skip
def test_the_final_norm_is_with_the_last_layer_of_a_model_with_mtp(
    name: str, mtp_layers: int | None, place: int
) -> None:
    assert place_after_layers(name, JobArguments.of({"num_layers": 8, "mtp_num_layers": mtp_layers})) == place
