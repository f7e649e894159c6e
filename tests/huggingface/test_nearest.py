"""Tests the error for an unknown family: the nearest families, and decisive traits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.nearest import deciding_traits, nearest_families
from mcore_ckpt_ext.families.recognition import FAMILIES, family_of_config
from mcore_ckpt_ext.formats.hugging_face.model import described_model
from tests.harness.huggingface import CONFIGS, tensors


def _parrot() -> dict[str, Any]:
    return {**CONFIGS["llama"]().to_dict(), "model_type": "parrot", "architectures": ["ParrotForCausalLM"]}


def test_a_family_that_is_not_known_is_refused_with_the_nearest() -> None:
    """Families are compared by names; equal ones say nothing about arithmetic, so the hint names no family."""
    with pytest.raises(UnsupportedCheckpointError, match="nearest: Llama, by names") as error:
        family_of_config(_parrot(), "here")
    assert error.value.details["hint"].endswith("--family path.py:Name")
    assert "--family Llama" not in str(error.value)
    feathers = {**_parrot(), **{f"feather_{number}": number for number in range(21)}}
    with pytest.raises(UnsupportedCheckpointError, match=r"except feather_0, .*feather_9 \(keys\)") as error:
        family_of_config(feathers, "here")
    assert "--accept-key" not in str(error.value)
    assert all(key in str(error.value) for key in feathers if key.startswith("feather"))
    with pytest.raises(UnsupportedCheckpointError, match="nearest: Llama, by names") as error:
        family_of_config({"model_type": "owl", "text_config": _parrot()}, "here")
    assert error.value.details["hint"].startswith("save its language model")  # a family would not find the text


def test_all_keys_that_a_family_does_not_know_are_listed(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal shows a summary, JSON every key; so many are not repeated in the hint."""
    feathers = {f"feather_{number}": "x" * 90 for number in range(21)}
    source = shutil.copytree(models["llama"], tmp_path / "model")
    config = {**json.loads((source / "config.json").read_text()), **feathers, "auto_map": {"AutoConfig": "parrot.P"}}
    (source / "config.json").write_text(json.dumps(config))
    command = ["convert", str(source), str(tmp_path / "run"), "--to", "torch_dist"]
    assert main(command) == 2
    shown = capsys.readouterr().err
    assert "... (in full with --json)" in shown and "--accept-key KEY for each" in shown and len(shown) < 1000
    assert main([*command, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["error"]["found"]
    assert all(f"{key}: " in found for key in feathers)


def test_the_nearest_family_is_also_that_of_its_tensors(models: dict[str, Path], tmp_path: Path) -> None:
    """Keys are like Qwen2's and tensors like Qwen3's; unmapped tensors are listed."""
    stored = {**tensors(models["qwen3"]), "model.layers.0.self_attn.feather.weight": torch.ones(1)}
    (tmp_path / "config.json").write_text(json.dumps(_parrot()))
    save_file(stored, tmp_path / "model.safetensors")
    nearest = r"nearest: Qwen3, except mlp_bias \(keys\) and model.layers.#.self_attn.feather.weight \(tensors\)"
    with pytest.raises(UnsupportedCheckpointError, match=f"{nearest}.*a family of its own"):
        described_model(tmp_path)


_LAYER = "model.layers.3."
_WEIGHTS = (f"{_LAYER}self_attn.q_proj.weight", f"{_LAYER}mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("values", "names", "why"),
    [
        ({"use_parallel_residual": True}, [], "parallel blocks"),
        ({}, [*_WEIGHTS, f"{_LAYER}input_layernorm.weight", f"{_LAYER}self_attn.q_norm.weight"], "parallel blocks"),
        ({"attn_config": {"alibi": True}}, [], "ALiBi"),
        ({}, [f"{_LAYER}post_attention_layernorm.weight", f"{_LAYER}post_feedforward_layernorm.weight"], "norms what"),
        ({"scale_depth": 1.4}, [], "by a factor"),
        ({"clip_qkv": 8.0}, [], "clips"),
        ({"is_encoder_decoder": True}, [], "an encoder"),
        ({"cross_attention_layers": [3]}, [], "cross-attention"),
        ({}, ["backbone.layers.0.mixer.x_proj.weight"], "first Mamba"),
    ],
)  # fmt: skip
def test_features_that_megatron_lacks_are_named_for_every_model_type(
    values: dict[str, Any], names: list[str], why: str
) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=f"what Megatron Core cannot build: .*{why}"):
        family_of_config({**_parrot(), **values}, "here", lambda: names)


def test_the_text_of_an_unknown_model_that_sees_may_be_one_that_megatron_lacks() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="model_type cohere2: .*parallel blocks"):
        family_of_config({"model_type": "aya_vision", "text_config": {"model_type": "cohere2"}}, "here")


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "deepseek_v3", "nemotron_h", "gemma3", "gpt_oss"])
def test_supported_models_have_no_unsupported_feature(name: str, models: dict[str, Path]) -> None:
    config = json.loads((models[name] / "config.json").read_text())
    assert deciding_traits(config, tensors(models[name])) == []


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "deepseek_v3"])
def test_layers_for_further_tokens_may_be_absent(name: str, models: dict[str, Path]) -> None:
    """Most folders have none: without them the family that has all names is the nearest still."""
    config = json.loads((models[name] / "config.json").read_text())
    nearest, *_ = nearest_families(config, tensors(models[name]), FAMILIES)
    assert str(nearest).endswith(", by names")
