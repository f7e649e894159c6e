"""Mixtral."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.arguments import ModelArguments
from mcore_ckpt_ext.families.common_settings import llama_like, sliding_window
from mcore_ckpt_ext.families.family import Family, Rule, with_experts
from mcore_ckpt_ext.families.settings import Both, Config, Needs, Same, checked_size

_ROUTER = Rule("model.layers.{layer}.mlp.gate.weight", "decoder.layers.{layer}.mlp.router.weight", where=with_experts)


def _sizes(arguments: ModelArguments) -> dict[str, Any]:
    return {"num_local_experts": arguments.num_experts, "intermediate_size": arguments.moe_ffn_hidden_size}


def _experts(config: Config) -> dict[str, Any]:
    count = checked_size("num_local_experts", config.get("num_local_experts", 8))
    return {"num_experts": count, "moe_layer_freq": 1, "moe_ffn_hidden_size": config["intermediate_size"]}


def _why_not(arguments: ModelArguments) -> list[str]:
    ours = bool(arguments.num_experts) and arguments.moe_layer_freq == 1
    return [] if ours else ["no experts in all layers"]


class Mixtral(Family):
    """Like Mistral, with experts in every layer; the chosen experts' logits are normalised among themselves."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    rules = (*parts.DECODER, *parts.experts("block_sparse_moe", gate="w1", up="w3", down="w2"))
    without_effect = ("router_jitter_noise",)
    also_read = (_ROUTER, *parts.STACKED_EXPERTS)
    settings = (
        *llama_like(1000000.0, 1e-5, groups=8),
        Both(("num_local_experts", "intermediate_size"), _sizes, _experts, _why_not,
             expressed=("num_experts", "moe_layer_freq", "moe_ffn_hidden_size")),
        Same("num_experts_per_tok", "moe_router_topk", 2),
        Same("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
        sliding_window(None),
        Needs({"add_bias_linear": False, "add_qkv_bias": False}),
    )  # fmt: skip
