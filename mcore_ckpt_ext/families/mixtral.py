"""Mixtral."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.arguments import Arguments
from mcore_ckpt_ext.families.family import Family, Rule, with_experts
from mcore_ckpt_ext.families.settings import (
    PLAIN,
    QUERY_KEY_VALUE,
    RMS_NORM,
    SILU,
    SIZES,
    TRAINING,
    Both,
    Needs,
    Same,
    checked_size,
    head_size,
    query_groups,
    rope,
    tied,
    window,
    window_of,
)

_ROUTER = Rule("model.layers.{layer}.mlp.gate.weight", "decoder.layers.{layer}.mlp.router.weight", where=with_experts)


def _why_not(arguments: Arguments) -> list[str]:
    ours = bool(arguments["num_experts"]) and arguments["moe_layer_freq"] == 1
    return [] if ours else ["no experts in all layers"]


class Mixtral(Family):
    """As Mistral, with experts in every layer; the chosen experts' logits are normalised among themselves."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    rules = (
        parts.EMBEDDING, *parts.attention(), parts.ATTENTION_OUTPUT,
        *parts.experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        parts.ATTENTION_NORM, *parts.MLP_NORM, *parts.OUTPUT,
    )  # fmt: skip
    also_read = (_ROUTER, *parts.STACKED_EXPERTS)
    settings = (
        *SIZES, query_groups(), head_size(), rope(1000000.0), tied(by_default=False), *TRAINING, SILU, RMS_NORM,
        Same("rms_norm_eps", "layernorm_epsilon", 1e-5),
        Both(
            ("num_local_experts",),
            lambda arguments: {"num_local_experts": arguments["num_experts"]},
            lambda config: {"num_experts": checked_size("num_local_experts", config.get("num_local_experts", 8)),
                            "moe_layer_freq": 1,
                            "moe_ffn_hidden_size": config["intermediate_size"]},
            _why_not,
        ),
        Both(
            ("intermediate_size",),
            lambda arguments: {"intermediate_size": arguments["moe_ffn_hidden_size"]},
            lambda config: {},
        ),
        Same("num_experts_per_tok", "moe_router_topk", 2),
        Same("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
        Both(
            ("sliding_window",),
            lambda arguments: {"sliding_window": window_of(arguments)},
            lambda config: window(config.get("sliding_window")),
        ),
        Needs({
            "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False, "moe_router_pre_softmax": False,
            "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
            "moe_shared_expert_intermediate_size": None, "moe_router_num_groups": None,
            "moe_router_topk_scaling_factor": None,
        }),
        PLAIN, QUERY_KEY_VALUE,
    )  # fmt: skip
