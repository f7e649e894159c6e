"""Tests models that Megatron-Bridge builds from `run_config.yaml`; tests/slow/test_bridge_logits.py compares logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext import TorchDist, convert
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.bridge import bridge_model
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.recognition import family_named
from tests.harness.huggingface import CONFIGS

SPEC = "transformer_layer_spec"


def _family_and_config(name: str, **changes: Any) -> tuple[Family, dict[str, Any]]:
    config = CONFIGS[name]().to_dict()
    return family_named(config["model_type"]), {**config, **changes}


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen2_moe"])
def test_layers_are_built_by_their_content(name: str) -> None:
    """Bridge's default function builds all layers alike, and none with latent attention."""
    family, config = _family_and_config(name)
    spec = bridge_model(family, family.arguments(config))[SPEC]
    assert spec["_target_"] == "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"
    assert (spec["_partial_"], spec["use_transformer_engine"]) == (True, True)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "nemotron_h"])
def test_other_models_have_the_layers_of_their_class(name: str) -> None:
    family, config = _family_and_config(name)
    assert SPEC not in bridge_model(family, family.arguments(config))


def test_grouped_queries_of_olmoe_are_refused() -> None:
    """Bridge's norm of keys is as wide as all query heads (`OLMoESelfAttention`)."""
    family, config = _family_and_config("olmoe")
    arguments = family.arguments(config)
    assert not family.mismatches(arguments)
    assert any("tensor_model_parallel_size 1" in notice for notice in family.notices(arguments))
    assert "num_query_groups is 2, not 4" in family.mismatches(arguments.replace(num_query_groups=2))
    with pytest.raises(UnsupportedCheckpointError, match="num_key_value_heads") as error:
        family.arguments({**config, "num_key_value_heads": 2})
    assert "as many keys as queries" in str(error.value)


def test_the_rotated_part_of_a_head_of_minimax_is_written_as_released() -> None:
    """Bridge and vLLM read `rotary_dim`; transformers computes it where it is missing."""
    family, config = _family_and_config("minimax_m2")
    arguments = family.arguments(config)
    written = family.config(arguments)
    assert (written["rotary_dim"], written["partial_rotary_factor"]) == (8, 0.5)
    without = {key: value for key, value in config.items() if key != "rotary_dim"}
    assert family.arguments(without) == arguments
    with pytest.raises(UnsupportedCheckpointError, match="contradicts itself: rotary_dim"):
        family.arguments({**config, "rotary_dim": 16})
    inexact = arguments.replace(rotary_percent=0.4)  # 6.4 of 16 elements
    others = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert family.arguments({**others, **family.config(inexact)}).rotary_percent == 0.4


def test_ling_in_autobridge_is_named(tmp_path: Path) -> None:
    """Bridge's own class of its configuration leaves the rotated part to `rope_parameters`, too."""
    source = shutil.copytree(Path(__file__).parent / "own_code" / "bailing_moe_v2", tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    assert config["partial_rotary_factor"] == 0.5
    report = convert(source, tmp_path / "run", TorchDist(loop="bridge"))
    assert any("not by AutoBridge" in note and "a part of 0.5" in note for note in report.notes)


@pytest.mark.parametrize(("name", "differs"), [("nemotron", True), ("qwen3_next", True), ("minimax_m2", False)])
def test_a_model_of_which_autobridge_makes_another_is_named(
    name: str, differs: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    report = convert(models[name], tmp_path / "run", TorchDist(loop="bridge"))
    assert any("not by AutoBridge" in note for note in report.notes) == differs


def test_other_kinds_of_layers_than_nets_and_attention_are_named() -> None:
    kinds = ["linear_attention", "sliding_attention"]
    family, config = _family_and_config("qwen3_5", layer_types=kinds * 2)
    with pytest.raises(UnsupportedCheckpointError, match="found: sliding_attention; expected"):
        family.arguments(config)
    with pytest.raises(UnsupportedCheckpointError, match="found: 1 kind for 4 layers; expected"):
        family.arguments({**config, "layer_types": kinds[:1]})
