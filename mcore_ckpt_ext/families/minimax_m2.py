"""MiniMax-M2, M2.5 and M2.7."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import NO_BIASES, experts_everywhere, llama_like
from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.family import Rule, with_experts
from mcore_ckpt_ext.families.full_width_qk_norm import FullWidthQKNorm
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Coefficient, Constant, Custom, Forbidden, Requires, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments


def _width(arguments: ModelArguments) -> dict[str, Any]:
    return {"intermediate_size": arguments.moe_ffn_hidden_size}


def _experts(config: Config) -> dict[str, Any]:
    if config.get("num_experts_per_tok", 8) < 2:  # Megatron does not normalize the weight of a single expert
        raise unrepresentable("num_experts_per_tok", 1, "2 or more")
    return {"moe_layer_freq": 1, "moe_ffn_hidden_size": config["intermediate_size"]}


def _everywhere(arguments: ModelArguments) -> list[str]:
    ours = experts_everywhere(arguments) and arguments.moe_router_topk > 1
    return [] if ours else ["no experts in all layers, or a single one chosen"]


class MiniMaxM2(FullWidthQKNorm):
    """Experts by sigmoid in every layer, grouped queries, RoPE on part of a head, norms across all heads.

    Megatron Core normalizes per head; names and shapes are those of Megatron-Bridge's own layer spec
    (`FullDimQNorm`, minimax_m2/minimax_m2_provider.py, commit 067f987d).
    """

    model_type = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    spec = "minimax_m2.minimax_m2_provider.minimax_m2_layer_spec"
    rules = (
        *parts.DECODER,
        *parts.QUERY_KEY_NORMS,
        *parts.experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        Rule(
            "model.layers.{layer}.block_sparse_moe.e_score_correction_bias",
            "decoder.layers.{layer}.mlp.router.expert_bias",
            where=with_experts,
            keeps_dtype=True,
        ),
    )
    # Keys about layers of its predecessor, and about MTP layers, whose weights are not published.
    without_effect = (
        "attn_type_list",
        "layernorm_full_attention_beta",
        "layernorm_linear_attention_beta",
        "layernorm_mlp_beta",
        "max_model_len",
        "mlp_intermediate_size",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "use_mtp",
        "shared_moe_mode",
        "router_jitter_noise",
    )
    settings = (
        *llama_like(
            head_dim=True, head_dim_default=128, groups=8, positions=Rope(5000000.0, partial=1.0, width="rotary_dim")
        ),
        Size("num_local_experts", "num_experts", 256, counted=True),
        Size("num_experts_per_tok", "moe_router_topk", 8),
        Custom(("intermediate_size",), _width, _experts, _everywhere, ("moe_layer_freq", "moe_ffn_hidden_size")),
        Constant("scoring_func", "sigmoid", {"moe_router_score_function": "sigmoid"}),
        Constant("use_routing_bias", True, {"moe_router_enable_expert_bias": True}),
        Constant("use_qk_norm", True, {"qk_layernorm": True}),
        Constant("qk_norm_type", "per_layer", {}),
        Coefficient("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
        Forbidden("shared_intermediate_size", "sliding_window"),
        Requires(NO_BIASES),
    )
