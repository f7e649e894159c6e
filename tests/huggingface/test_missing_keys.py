"""Tests keys of `config.json` that are missing, null or contradictory: as in transformers, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.config_keys import SIZES
from mcore_ckpt_ext.families.recognition import family_named
from mcore_ckpt_ext.families.text_parts import text_config
from mcore_ckpt_ext.families.vision import sections_of
from mcore_ckpt_ext.job.model_arguments import ModelArguments
from tests.harness.huggingface import CONFIGS, save_whole, tensors

_TIED = "tie_word_embeddings"
_LENGTH = "original_max_position_embeddings"


def _config(name: str, **changes: Any) -> dict[str, Any]:
    return {**CONFIGS[name]().to_dict(), **changes}


def _arguments(config: dict[str, Any]) -> ModelArguments:
    return family_named(config["model_type"]).arguments(config)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "dots1", "glm4_moe", "gpt2", "nemotron_h", "minimax_m2"])
def test_a_missing_size_is_that_of_the_class(name: str) -> None:
    """None is refused for the lack of it; whether it fits the tensors is checked when they are read."""
    whole = _config(name)
    compared = []
    for key in whole.keys() & {*SIZES}:
        less = {other: value for other, value in whole.items() if other != key}
        try:
            by_class = AutoConfig.for_model(**less).to_dict()
            expected = _arguments({**less, key: by_class[key]})
        except (StrictDataclassClassValidationError, UnsupportedCheckpointError):
            continue  # the class's size contradicts the other keys
        assert _arguments(less) == expected, key
        compared.append(key)
    assert len(compared) >= 3


def test_ministral_3_without_a_base_or_without_any_key_of_rope() -> None:
    """Its class has 10,000 as every other where `rope_parameters` lacks a base, and YaRN of 1,000,000 without them."""
    config = _config("ministral3")
    rope = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
    without_base = {**config, "rope_parameters": rope}
    without_rope = {key: value for key, value in config.items() if key != "rope_parameters"}
    for less in (without_base, without_rope):
        by_class = AutoConfig.for_model(**less).to_dict()
        assert _arguments(less) == _arguments({**less, "rope_parameters": by_class["rope_parameters"]})
    assert _arguments(without_base).rotary_base == 10000
    assert _arguments(without_rope).rotary_base == 1000000


def test_the_original_length_may_be_beside_the_keys_of_yarn() -> None:
    """The model's class puts it there (`_compute_yarn_parameters` of transformers)."""
    config = _config("qwen2_yarn")
    rope = {key: value for key, value in config["rope_parameters"].items() if key != _LENGTH}
    for length in (32, 64):
        by_class = AutoConfig.for_model(**{**config, _LENGTH: length, "rope_parameters": {**rope}})
        by_class.standardize_rope_params()
        assert by_class.rope_parameters[_LENGTH] == length
        assert (
            _arguments({**config, _LENGTH: length, "rope_parameters": rope}).yarn_original_max_position_embeddings
            == length
        )


def test_empty_keys_of_rope_are_unscaled() -> None:
    """Without such keys the class has YaRN."""
    assert AutoConfig.for_model(**_config("gpt_oss", rope_parameters={})).rope_parameters["rope_type"] == "default"
    assert _arguments(_config("gpt_oss", rope_parameters={})).position_embedding_type == "rope"
    assert _arguments(_config("gpt_oss", rope_parameters=None)).position_embedding_type == "yarn"


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next", "minimax_m2"])
def test_a_rotated_part_without_a_value_is_refused(name: str) -> None:
    """A class rotates whole heads where the key is null, and a part of them where it is missing."""
    config = _config(name, partial_rotary_factor=None, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    assert AutoConfig.for_model(**config).to_dict()["rope_parameters"].get("partial_rotary_factor") is None
    with pytest.raises(UnsupportedCheckpointError, match="partial_rotary_factor: null"):
        _arguments(config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dots1", {"topk_group": 0}, "topk_group"),
        ("glm4_moe_lite", {"head_dim": 2}, "head_dim"),
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 4}, "num_experts; found: 8, and 4 as num_local_experts"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "3 kinds for 2 layers"),
        ("dots1", {"layer_types": ["full_attention"] * 3}, "3 kinds for 2 layers"),
        ("deepseek_v32", {"layer_types": ["indexed_attention"]}, "1 kind for 2 layers"),
        ("qwen2_yarn", {_LENGTH: 64}, "64, and 32 among rope_parameters"),
        ("llama3_tied", {_LENGTH: 64}, "64, and 8192 among rope_parameters"),
        ("deepseek_v3", {_LENGTH: 64}, "64, and 4096 among rope_parameters"),
        ("gemma3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "keys sliding_attention and full"),
        ("gpt_neox", {"partial_rotary_factor": 0.5, "rope_parameters": None}, "rotary_pct; found: 0.25, and 0.5"),
    ],
)
def test_values_that_transformers_would_compute_otherwise_are_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=message):
        _arguments(_config(name, **changes))


@pytest.mark.parametrize("name", ["gemma", "gemma2"])
def test_attention_to_earlier_tokens_may_be_stated(name: str) -> None:
    assert _arguments(_config(name, use_bidirectional_attention=False)) == _arguments(_config(name))


@pytest.mark.parametrize("is_tied", [True, False])
def test_tensors_decide_whether_embeddings_are_tied(is_tied: bool, tmp_path: Path) -> None:
    """The class of Mistral 3 ties them without the key, and transformers does not where the output layer is stored."""
    folder = tmp_path / "whole"
    save_whole("mistral3", folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in config.items() if key != _TIED}))
    stored = tensors(folder)
    output = stored.pop("language_model.lm_head.weight")
    kept = stored if is_tied else {**stored, "language_model.lm_head.weight": output}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    mcore_ckpt_ext.convert(folder, tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "text", mcore_ckpt_ext.HuggingFace())
    tokens = torch.arange(40).view(2, 20)
    text, whole = AutoModelForCausalLM, AutoModelForImageTextToText
    with torch.no_grad():
        found = text.from_pretrained(tmp_path / "text")(tokens).logits
        torch.testing.assert_close(found, whole.from_pretrained(folder)(tokens).logits, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "text" / "config.json").read_text())[_TIED] == is_tied


@pytest.mark.parametrize(
    "kind",
    ["llava", "llava_next_video", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "glm4v_moe", "mistral3", "smolvlm"],
)
def test_the_text_of_an_older_file_may_tie_the_whole(kind: str) -> None:
    """Up to transformers 4 the key was saved with the text; some classes of 5.23 still read it there."""
    config = {"model_type": kind, _TIED: False, "text_config": {**AutoConfig.for_model(kind).text_config.to_dict()}}
    config["text_config"][_TIED] = True
    text = text_config(config)
    assert text is not None
    assert text[_TIED] == AutoConfig.for_model(**config).tie_word_embeddings


def test_axes_of_positions_in_images_are_those_of_the_class() -> None:
    """Some files of Qwen3-VL have a base of RoPE alone."""
    classes = {"qwen2_5_vl": Qwen2_5_VLRotaryEmbedding, "qwen3_vl": Qwen3VLTextRotaryEmbedding}
    for kind, of_class in classes.items():
        config = AutoConfig.for_model(kind)
        assert sections_of({"model_type": kind, "text_config": {}}) == of_class(config.text_config).mrope_section
    assert sections_of({"model_type": "qwen3_vl", "text_config": {"rope_scaling": {"mrope_section": [1]}}}) == [1]


@pytest.mark.parametrize(
    "kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe", "qwen2_5_omni_thinker", "llava_next"]
)
def test_a_key_that_a_text_lacks_means_what_it_means_to_the_class_of_the_whole(kind: str) -> None:
    """For one, Qwen2.5-VL has a base of 1,000,000 and an epsilon of 1e-5, where Qwen2 has 10,000 and 1e-6."""
    whole = AutoConfig.for_model(kind)
    of_class = whole.text_config.to_dict()
    family = family_named(str((text_config(_whole(kind, of_class)) or {})["model_type"]))
    keys = {key for setting in family.settings for key in setting.keys} & of_class.keys()
    # Tensors decide about the first two, and releases disagree about the base of RoPE.
    left_out = {_TIED, "num_local_experts", *(["rope_parameters"] if kind.startswith("qwen3_vl") else [])}
    compared = []
    for key in keys - left_out:
        text = {other: value for other, value in of_class.items() if other != key}
        assert _text_arguments(kind, text) == _text_arguments(kind, of_class), key
        compared.append(key)
    assert len(compared) >= 12


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_a_base_that_releases_of_transformers_disagree_about_is_asked_for(kind: str) -> None:
    text = {**AutoConfig.for_model(kind).text_config.to_dict(), "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(UnsupportedCheckpointError, match=f"no rope_theta, which means 5,000,000 to {kind} in 4.57"):
        text_config(_whole(kind, text))


def _whole(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": kind, "text_config": text, _TIED: False}


def _text_arguments(kind: str, text: dict[str, Any]) -> ModelArguments:
    described = text_config(_whole(kind, text))
    assert described is not None
    return family_named(described["model_type"]).mapped_arguments(described)
