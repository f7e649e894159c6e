"""Qwen3-MoE."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import full_attention, has_window
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.qwen_experts import expert_settings
from mcore_ckpt_ext.families.settings import Constant, Requires


class Qwen3MoE(Family):
    """Like Qwen3, with experts and no shared expert."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    without_effect = ("sliding_window", "max_window_layers")
    rules = (*parts.DECODER, *parts.QUERY_KEY_NORMS, *parts.experts())
    read_rules = parts.STACKED_EXPERTS
    settings = (
        *llama_like(head_dim=True, groups=4),
        *expert_settings(128, 8, 768),
        full_attention(reaches=has_window(4096)),
        Requires({"qk_layernorm": True}),
        Constant("attention_bias", False, NO_BIASES),
    )
