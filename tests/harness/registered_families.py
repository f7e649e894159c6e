"""A distribution that registers a Hugging Face family by entry point, and a model of that family."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CODE = '''"""Parrots: Llama with biases, norms of queries and keys under names of its own, and a `parrot_eps`."""
from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import llama_like
from mcore_ckpt_ext.families.family import Family, Rule
from mcore_ckpt_ext.families.settings import Mapped, Requires


class Parrot(Family):
    model_type = "parrot"
    architecture = "ParrotForCausalLM"
    rules = (
        *parts.DECODER,
        *parts.attention("bias"),
        Rule("model.layers.{layer}.perch.weight", "decoder.layers.{layer}.self_attention.q_layernorm.weight"),
        Rule("model.layers.{layer}.claw.weight", "decoder.layers.{layer}.self_attention.k_layernorm.weight"),
    )
    settings = (
        *llama_like(),
        Mapped("parrot_eps", "layernorm_epsilon", 1e-5),
        Requires({"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True}),
    )
'''
_OF_QWEN = ("rms_norm_eps", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def distribution_with_family(
    site: Path, name: str = "parrot-families", model_type: str = "parrot", module: str = "parrot_families"
) -> Path:
    """Install a distribution of version 1.5 into the folder `site` and return that folder."""
    metadata = site / f"{name.replace('-', '_')}-1.5.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(f"[mcore_ckpt_ext.families]\n{model_type} = {module}:Parrot\n")
    (site / f"{module}.py").write_text(CODE)
    return site


def parrot_model(qwen2: Path, folder: Path) -> Path:
    """Make a parrot of a Qwen2 model in `folder` and return it."""
    config = json.loads((qwen2 / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in _OF_QWEN}
    config |= {"model_type": "parrot", "architectures": ["ParrotForCausalLM"], "parrot_eps": 3e-4}
    tensors, width = load_file(qwen2 / "model.safetensors"), config["hidden_size"] // config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.{name}.weight": 1 + torch.randn(width) / 8 for name in ("perch", "claw")}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
