"""Qwen3-MoE."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.qwen_experts import ROUTING, expert_count, expert_layers, normalised_choice
from mcore_ckpt_ext.families.settings import (
    NO_WINDOW,
    PLAIN,
    QUERY_KEY_VALUE,
    RMS_NORM,
    SILU,
    SIZES,
    TRAINING,
    Fixed,
    Needs,
    Same,
    Size,
    head_size,
    query_groups,
    rope,
    tied,
)


class Qwen3MoE(Family):
    """As Qwen3, with experts and no shared one."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    rules = (
        parts.EMBEDDING, *parts.attention(), parts.ATTENTION_OUTPUT, *parts.QUERY_KEY_NORMS, *parts.MLP,
        *parts.experts(), parts.ATTENTION_NORM, *parts.MLP_NORM, *parts.OUTPUT,
    )  # fmt: skip
    also_read = parts.STACKED_EXPERTS
    settings = (
        *SIZES, query_groups(), head_size(always=True), rope(), tied(by_default=False), *TRAINING, SILU, RMS_NORM,
        Same("rms_norm_eps", "layernorm_epsilon", 1e-6),
        expert_count(128), expert_layers(), normalised_choice(), ROUTING,
        Size("num_experts_per_tok", "moe_router_topk", 8),
        Size("moe_intermediate_size", "moe_ffn_hidden_size", 768),
        Same("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
        Fixed("attention_bias", False, {"add_bias_linear": False, "add_qkv_bias": False}),
        Needs({"qk_layernorm": True, "moe_shared_expert_intermediate_size": None}), PLAIN, QUERY_KEY_VALUE, NO_WINDOW,
        Fixed("use_sliding_window", False, {}),
    )  # fmt: skip
