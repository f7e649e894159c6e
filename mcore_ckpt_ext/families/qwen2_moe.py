"""Qwen1.5-MoE and Qwen2-MoE."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.family import Family, Rule, with_experts
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

_SHARED_GATE = Rule(
    "model.layers.{layer}.mlp.shared_expert_gate.weight", "decoder.layers.{layer}.mlp.shared_experts.gate_weight",
    where=with_experts,
)  # fmt: skip


class Qwen2MoE(Family):
    """As Qwen2, with experts and a shared expert behind a gate of its own."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    rules = (
        parts.EMBEDDING, *parts.attention(), *parts.attention("bias"), parts.ATTENTION_OUTPUT, *parts.MLP,
        *parts.experts(), *parts.shared_experts("shared_expert"), _SHARED_GATE, parts.ATTENTION_NORM, *parts.MLP_NORM,
        *parts.OUTPUT,
    )  # fmt: skip
    also_read = parts.STACKED_EXPERTS
    settings = (
        *SIZES, query_groups(), head_size(), rope(), tied(by_default=False), *TRAINING, SILU, RMS_NORM,
        Same("rms_norm_eps", "layernorm_epsilon", 1e-6),
        expert_count(60), expert_layers(), normalised_choice(), ROUTING,
        Size("num_experts_per_tok", "moe_router_topk", 4),
        Size("moe_intermediate_size", "moe_ffn_hidden_size", 1408),
        Size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 5632),
        Same("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
        Fixed("qkv_bias", True, {"add_bias_linear": False, "add_qkv_bias": True}),
        Needs({"qk_layernorm": False, "moe_shared_expert_gate": True}), PLAIN, QUERY_KEY_VALUE, NO_WINDOW,
        Fixed("use_sliding_window", False, {}),
    )  # fmt: skip
