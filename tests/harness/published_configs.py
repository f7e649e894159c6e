"""Tiny models of published configurations, and the check that all of them must pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scaled_configs import scaled
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import mcore_ckpt_ext
from mcore_ckpt_ext.families.recognition import family_of_config
from mcore_ckpt_ext.families.text_parts import text_config, text_names
from tests.harness.huggingface import tensors

FOLDER = Path(__file__).parents[1] / "huggingface" / "published"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
# Features that Megatron does not support, with the reason.
REFUSED = {
    "deepseek-v2-ipex": "transformers ranks a group of experts by its best one, Megatron by the sum of its best 2",
    "ome--gte_qwen2_7b": "is_causal: False",
    "phi-3.5": "short_factor scales 5 of 6 frequencies each in its own way",
    "phi-4-mini": "attention factor multiplies the part of a head that is rotated, 0.75",
}
# Types without a class in transformers, with the class of an equal model; their own code is not run.
_SAME_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "xverse": "llama"}
# The type of a vision-language model whose folder has the type of its text.
_WITH_IMAGES = {"ministral3": "mistral3"}
# Types without any such class: their tensors follow from the family's rules, and there are no logits.
WITHOUT_CLASS = ("chatglm", "deepseek", "orion", "qwen")
ACCEPTED = [name for name in NAMES if name not in REFUSED]
_ABOUT_OTHER_FILES = {"quantization_config", "auto_map"}


def configuration(name: str) -> dict[str, Any]:
    """Return a published configuration with small sizes and without quantization; weights are made in bf16."""
    config = scaled(json.loads((FOLDER / f"{name}.json").read_text()))
    config.pop("quantization_config", None)
    if "text_config" in config:
        config["text_config"].pop("quantization_config", None)
    return config


def make_published(config: dict[str, Any], folder: Path) -> Any:
    """Make a model of a configuration, saved with that configuration; None if its class is unknown."""
    folder.mkdir()
    if config["model_type"] in WITHOUT_CLASS:
        (folder / "config.json").write_text(json.dumps(config))
        save_file(_tensors_by_rules(config), folder / "model.safetensors", {"format": "pt"})
        return None
    sees = "vision_config" in config
    same_as = _WITH_IMAGES if sees else _SAME_AS
    built = {**config, "model_type": same_as.get(config["model_type"], config["model_type"])}
    if built["model_type"] != config["model_type"]:
        built.pop("auto_map", None)
    file = folder / "config.json"
    file.write_text(json.dumps(built))
    description = AutoConfig.from_pretrained(folder)
    if sees and hasattr(description.vision_config, "num_hidden_layers"):
        description.vision_config.num_hidden_layers = 1  # under any name in the file
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    torch.manual_seed(len(config))
    dtype = getattr(torch, _dtype(config))
    model = kind.from_config(description, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (0.5 if parameter.dim() == 1 else 0))
            if "linear_attn.norm" in label:
                parameter.copy_((parameter.abs() + 0.5).clamp(max=2))  # minus 1 without rounding
    # transformers 5.23 names Kimi-K2.5's text layers `blocks`, like the released vision layers.
    model.save_pretrained(folder, save_original_format=config["model_type"] != "kimi_k25")
    file.write_text(json.dumps(config))
    return model


def _tensors_by_rules(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    family = family_of_config(config, "")
    torch.manual_seed(len(config))
    dtype = getattr(torch, _dtype(config))
    return {tensor.name: torch.randn(tensor.shape, dtype=dtype) for tensor in family.tensors(family.arguments(config))}


def _dtype(config: dict[str, Any]) -> str:
    inside = config.get("text_config") or {}
    return next(
        (part[key] for part in (config, inside) for key in ("torch_dtype", "dtype") if part.get(key)), "float32"
    )


def text_of(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model, or of its text part under the names of a text model."""
    stored = tensors(folder)
    if "vision_config" not in config:
        return stored
    return {ours: stored[name] for name, ours in text_names(stored).items() if ours is not None}


def assert_round_trip(name: str, tmp_path: Path) -> None:
    """Check that a configuration is accepted, and that every tensor, logit and key comes back from torch_dist."""
    config = configuration(name)
    model = make_published(config, tmp_path / "model")
    older = config["model_type"] == "deepseek_v2" and config["q_lora_rank"] is None
    target = mcore_ckpt_ext.TorchDist(megatron_version="0.18.0" if older else None)
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", target)
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    found = json.loads((tmp_path / "back" / "config.json").read_text())
    text = text_config(config)
    published = {**text, "architectures": found["architectures"]} if text else config
    assert found == {key: value for key, value in published.items() if key not in _ABOUT_OTHER_FILES}
    stored, back = text_of(tmp_path / "model", config), tensors(tmp_path / "back")
    # Experts that are stacked in the folder come back unstacked; the logits cover them.
    stacked = any(label.endswith(".mlp.experts.gate_up_proj") for label in stored)
    compared = {label for label in stored if not (stacked and ".mlp.experts." in label)}
    assert {label for label in back if not (stacked and ".mlp.experts." in label)} == compared
    assert [label for label in compared if not torch.equal(stored[label], back[label])] == []
    if model is not None:
        _assert_same_logits(model, tmp_path / "back", config)


def _assert_same_logits(model: Any, folder: Path, config: dict[str, Any]) -> None:
    """Check that the converted folder has the same logits as the original model."""
    if (kind := config["model_type"]) in _SAME_AS:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": _SAME_AS[kind]}))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, attn_implementation="eager").eval()
    tokens = torch.arange(40).view(2, 20) + 5
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
