"""Qwen1.5-MoE and Qwen2-MoE."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import full_attention
from mcore_ckpt_ext.families.common_settings import llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.qwen_experts import SHARED_EXPERT_GATE, expert_settings
from mcore_ckpt_ext.families.settings import Constant, Requires, Size


class Qwen2MoE(Family):
    """Like Qwen2, with experts and a gated shared expert."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    without_effect = ("sliding_window", "max_window_layers")
    rules = (
        *parts.DECODER,
        *parts.attention("bias"),
        *parts.experts(),
        *parts.shared_experts("shared_expert"),
        SHARED_EXPERT_GATE,
    )
    read_rules = parts.STACKED_EXPERTS
    settings = (
        *llama_like(groups=16),
        *expert_settings(60, 4, 1408),
        full_attention(),
        Size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 5632),
        Constant("qkv_bias", True, {"add_bias_linear": False, "add_qkv_bias": True}),
        Requires({"moe_shared_expert_gate": True}),
    )
