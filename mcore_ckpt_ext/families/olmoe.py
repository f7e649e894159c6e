"""OLMoE."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like, why_not_everywhere
from mcore_ckpt_ext.families.full_width_qk_norm import FullWidthQKNorm
from mcore_ckpt_ext.families.qwen_experts import normalized_choice
from mcore_ckpt_ext.families.settings import Coefficient, Constant, Custom, Forbidden, Requires, Size


class OLMoE(FullWidthQKNorm):
    """Experts by softmax in every layer, norms of queries and keys across all heads.

    Names and shapes are those of Megatron-Bridge's own attention (olmoe/olmoe_provider.py, commit 067f987d).
    """

    model_type = "olmoe"
    spec = "olmoe.olmoe_provider.olmoe_layer_spec"
    architecture = "OlmoeForCausalLM"
    contained_in = "Qwen3-MoE"  # but for the width of its norms, which is checked
    rules = (*parts.DECODER, *parts.QUERY_KEY_NORMS, *parts.experts())
    read_rules = parts.STACKED_EXPERTS
    settings = (
        *llama_like(epsilon=1e-5),
        Size("num_experts", "num_experts", 64, counted=True),
        Size("num_experts_per_tok", "moe_router_topk", 8),
        Custom(
            ("intermediate_size",),
            lambda arguments: {"intermediate_size": arguments.moe_ffn_hidden_size},
            lambda config: {"moe_layer_freq": 1, "moe_ffn_hidden_size": config["intermediate_size"]},
            why_not_everywhere,
            ("moe_layer_freq", "moe_ffn_hidden_size"),
        ),
        normalized_choice(),
        Coefficient("router_aux_loss_coef", "moe_aux_loss_coeff", 0.01),
        Forbidden("clip_qkv"),
        Constant("attention_bias", False, NO_BIASES),
        Requires({"qk_layernorm": True, "moe_router_score_function": "softmax"}),
    )
