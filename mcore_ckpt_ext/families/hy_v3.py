"""Hunyuan V3 (Hy3)."""

from __future__ import annotations

from dataclasses import replace

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.deepseek import listed_dense_first, normalized_sigmoids, scaled_gates, shared_experts
from mcore_ckpt_ext.families.deepseek_v3 import WithMtp, mtp_layers
from mcore_ckpt_ext.families.family import Rule, with_experts
from mcore_ckpt_ext.families.settings import Constant, Mapped, Requires, Size

_OURS = "decoder.layers.{layer}.mlp"
_THEIRS = "model.layers.{layer}.mlp"
_RULES = (
    *parts.DECODER,
    *parts.QUERY_KEY_NORMS,
    *parts.experts(router="router.gate"),
    *parts.shared_experts("shared_mlp"),
    Rule(f"{_THEIRS}.expert_bias", f"{_OURS}.router.expert_bias", where=with_experts, keeps_dtype=True),
)


class HyV3(WithMtp):
    """DeepSeek-V3's experts without groups, with grouped queries and norms of queries and keys.

    Sources: transformers/models/hy_v3 (5.23), and conversion_mapping.py for the names of released tensors;
    hy_v3/hy_v3_bridge.py of Megatron-Bridge (067f987d).
    """

    model_type = "hy_v3"
    architecture = "HYV3ForCausalLM"
    rules = (
        *_RULES,
        *(
            replace(rule, hugging_face=rule.hugging_face.replace("shared_head.norm", "final_layernorm"))
            for rule in parts.mtp_layers(_RULES)
        ),
    )
    read_rules = (
        *parts.STACKED_EXPERTS,
        *parts.shared_experts("shared_experts"),
        Rule(f"{_THEIRS}.gate.weight", f"{_OURS}.router.weight", where=with_experts),
        Rule(f"{_THEIRS}.e_score_correction_bias", f"{_OURS}.router.expert_bias", where=with_experts, keeps_dtype=True),
    )
    without_effect = ("enable_moe_fp32_combine",)  # the precision in which outputs are added
    settings = (
        *llama_like(11158840.0, 1e-5, head_dim=True, head_dim_default=128, groups=8),
        Mapped("initializer_range", "init_method_std", 0.006),
        Size("num_experts", "num_experts", 192, counted=True),
        shared_experts("num_shared_experts", 1),
        Size("num_experts_per_tok", "moe_router_topk", 8),
        Size("moe_intermediate_size", "moe_ffn_hidden_size", 1536),
        listed_dense_first(1, counts=False),
        mtp_layers(),
        scaled_gates(2.826, "router_scaling_factor"),
        normalized_sigmoids(8, "route_norm"),
        Constant("moe_router_use_sigmoid", True, {"moe_router_score_function": "sigmoid"}),
        Constant("moe_router_enable_expert_bias", True, {"moe_router_enable_expert_bias": True}),
        Constant("qk_norm", True, {"qk_layernorm": True}),
        Constant("mlp_bias", False, {}),
        Constant("attention_bias", False, NO_BIASES),
        Requires({"moe_router_num_groups": None, "moe_router_group_topk": None}),
    )
