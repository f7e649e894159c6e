"""GLM-4.5, 4.6 and 4.5-Air."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import llama_like
from mcore_ckpt_ext.families.deepseek import dense_first, expert_sizes, sigmoid_routing
from mcore_ckpt_ext.families.deepseek_v3 import WithMtp, mtp_layers
from mcore_ckpt_ext.families.family import set_in
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Mapped, Requires

_RULES = (
    *parts.DECODER,
    *parts.attention("bias", set_in("add_qkv_bias")),
    *parts.query_key_norms(set_in("qk_layernorm")),
    *parts.experts(),
    *parts.shared_experts("shared_experts"),
    parts.EXPERT_BIAS,
)


class Glm4MoE(WithMtp):
    """DeepSeek-V3's experts, grouped queries, RoPE on half a head; optional biases and norms of queries."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    rules = (*_RULES, *parts.mtp_layers(_RULES))
    read_rules = parts.STACKED_EXPERTS
    settings = (
        *llama_like(epsilon=1e-5, head_dim=True, groups=8, positions=Rope(partial=0.5)),
        *expert_sizes(128, 8, 1408),
        dense_first(1),
        *sigmoid_routing(1, 1, 1.0),
        Mapped("attention_bias", "add_qkv_bias", False),
        mtp_layers(),
        Mapped("use_qk_norm", "qk_layernorm", False),
        Requires({"add_bias_linear": False}),
    )
