"""Qwen3, dense."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import full_attention, window_begins
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Constant, Requires


class Qwen3(Family):
    """Like Llama, with norms of queries and keys per head, and an explicit head size."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    without_effect = ("sliding_window", "max_window_layers")
    rules = (*parts.DECODER, *parts.QUERY_KEY_NORMS)
    settings = (
        *llama_like(head_dim=True, head_dim_default=128, groups=32),
        full_attention(reaches=window_begins),
        Requires({"qk_layernorm": True}),
        Constant("attention_bias", False, NO_BIASES),
    )
