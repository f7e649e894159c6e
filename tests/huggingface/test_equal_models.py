"""Tests models whose configuration looks unsupported, and that compute what Megatron computes: read, not refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.recognition import FAMILIES
from tests.harness.huggingface import CONFIGS, assert_same_tensors, make, tensors, torch_dist

WINDOW = {"use_sliding_window": True, "sliding_window": 4, "layer_types": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a model of the harness once."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        make(name, folder)
        return folder

    return made


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(torch.arange(40).view(2, 20)).logits
    return logits


def edit(folder: Path, keys: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def changed_model(name: str, folder: Path, keys: dict[str, Any]) -> torch.Tensor:
    """Save a model with other keys than that of the harness, biases included, and return its logits."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(**{**CONFIGS[name]().to_dict(), **keys})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return logits_of(folder)


def there_and_back(name: str, model: Path, root: Path) -> Path:
    mcore_ckpt_ext.convert(model, root / "run", torch_dist(name))
    mcore_ckpt_ext.convert(root / "run", root / "back", mcore_ckpt_ext.HuggingFace())
    return root / "back"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen2", {**WINDOW, "max_window_layers": 2}),
        ("qwen3", {**WINDOW, "max_window_layers": 7}),
        ("qwen3", {**WINDOW, "max_window_layers": 0, "layer_types": ["full_attention"] * 2}),
        ("qwen3", {**WINDOW, "max_window_layers": 0, "sliding_window": None}),
        ("qwen3_moe", {**WINDOW, "sliding_window": None}),
        ("smollm3", {**WINDOW, "sliding_window": None}),
    ],
    ids=str,
)
def test_a_window_that_reaches_no_layer(
    name: str, keys: dict[str, Any], model: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers computes the same as without it, and so does the model that comes back."""
    shutil.copytree(model(name), tmp_path / "model")
    edit(tmp_path / "model", keys)
    expected = logits_of(model(name))
    assert torch.equal(logits_of(tmp_path / "model"), expected)
    assert torch.equal(logits_of(there_and_back(name, tmp_path / "model", tmp_path)), expected)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen2", {**WINDOW, "max_window_layers": 1}),
        ("qwen3", {**WINDOW, "max_window_layers": 1}),
        ("qwen3", {**WINDOW, "max_window_layers": 7, "layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen2_moe", {**WINDOW, "max_window_layers": 2}),
        ("qwen3_moe", WINDOW),
        ("smollm3", WINDOW),
    ],
    ids=str,
)
def test_a_window_that_reaches_a_layer_is_refused(
    name: str, keys: dict[str, Any], model: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(model(name), tmp_path / "model")
    edit(tmp_path / "model", keys)
    assert not torch.equal(logits_of(tmp_path / "model"), logits_of(model(name)))
    with pytest.raises(UnsupportedCheckpointError, match="does not support: (use_sliding_window|layer_types)"):
        mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", torch_dist(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_missing_positions_are_those_of_the_class(name: str) -> None:
    config = {key: value for key, value in CONFIGS[name]().to_dict().items() if key != "max_position_embeddings"}
    if "max_position_embeddings" not in CONFIGS[name]().to_dict():
        return
    family = next(family for family in FAMILIES if family.model_type == config["model_type"])
    by_class = AutoConfig.for_model(**config).max_position_embeddings
    assert family.mapped_arguments(config).max_position_embeddings == by_class


def test_other_names_of_experts_and_layers_of_glm_5() -> None:
    """transformers renames the kind of layer, and takes `num_experts` for `n_routed_experts`."""
    config = CONFIGS["glm_moe_dsa"]().to_dict()
    family = next(family for family in FAMILIES if family.model_type == "glm_moe_dsa")
    older = {"layer_types": ["deepseek_sparse_attention"] * config["num_hidden_layers"]}
    renamed = {**config, **older, "num_experts": config["n_routed_experts"]}
    by_class = AutoConfig.for_model(**renamed).to_dict()
    assert by_class.pop("num_experts") == config["n_routed_experts"]
    assert by_class == AutoConfig.for_model(**config).to_dict()
    assert family.arguments(renamed).values == family.arguments(config).values
    with pytest.raises(UnsupportedCheckpointError, match="contradicts itself: num_experts"):
        family.arguments({**config, "num_experts": 2 * config["n_routed_experts"]})


def test_a_window_may_be_longer_than_65536_tokens() -> None:
    family = next(family for family in FAMILIES if family.model_type == "mistral")
    config = {**CONFIGS["mistral"]().to_dict(), "sliding_window": 262_144}
    assert family.mapped_arguments(config).window_size == (262_143, 0)


BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("arcee", BIASES),
        ("nemotron", BIASES),
        ("smollm3", BIASES),
        ("ernie4_5", {"use_bias": True}),
        ("gpt_bigcode", {"tie_word_embeddings": False}),
        ("gpt_bigcode", {"tie_word_embeddings": False, "multi_query": False, "num_key_value_heads": 4}),
    ],
    ids=str,
)
def test_biases_everywhere_and_untied_embeddings(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    expected = changed_model(name, tmp_path / "model", keys)
    back = there_and_back(name, tmp_path / "model", tmp_path)
    assert_same_tensors(tmp_path / "model", back)
    assert torch.equal(logits_of(back), expected)
    assert any("mlp" in label and label.endswith("bias") for label in tensors(back))
    family = next(family for family in FAMILIES if family.model_type == CONFIGS[name]().model_type)
    assert json.loads((back / "config.json").read_text())["architectures"] == [family.architecture]


@pytest.mark.parametrize("name", ["llama", "arcee", "nemotron", "smollm3"])
@pytest.mark.parametrize("key", BIASES)
def test_biases_of_one_part_are_refused(name: str, key: str, tmp_path: Path) -> None:
    changed_model(name, tmp_path / "model", {key: True})
    with pytest.raises(UnsupportedCheckpointError, match="attention_bias and mlp_bias.*True for each, or False"):
        mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", torch_dist(name))
