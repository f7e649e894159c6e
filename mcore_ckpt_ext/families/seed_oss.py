"""Seed-OSS."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Constant, Mapped


class SeedOss(Family):
    """Qwen2 with another name, an explicit head size, and dropout in training."""

    model_type = "seed_oss"
    architecture = "SeedOssForCausalLM"
    contained_in = "Qwen2"
    rules = (*parts.DECODER, *parts.attention("bias"))
    settings = (
        *llama_like(head_dim=True, head_dim_default=128, groups=8),
        Constant("attention_bias", True, {"add_bias_linear": False, "add_qkv_bias": True}),
        Constant("attention_out_bias", False, {}),
        Constant("mlp_bias", False, {}),
        Mapped("attention_dropout", "attention_dropout", 0.1),
        Mapped("residual_dropout", "hidden_dropout", 0.1),
    )
