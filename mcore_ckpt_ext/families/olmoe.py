"""OLMoE."""

from __future__ import annotations

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like, why_not_everywhere
from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.full_width_qk_norm import FullWidthQKNorm
from mcore_ckpt_ext.families.qwen_experts import normalized_choice
from mcore_ckpt_ext.families.settings import (
    CheckedKeys,
    Coefficient,
    Constant,
    Custom,
    Excludes,
    Forbidden,
    Requires,
    Size,
)
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_GROUPS = "num_key_value_heads"


def _check_groups(config: Config) -> None:
    heads = config["num_attention_heads"]
    groups = config.get(_GROUPS) or heads
    if groups != heads:
        norms = "Megatron-Bridge, which alone builds this model, norms as many keys as queries (OLMoESelfAttention)"
        raise unrepresentable(_GROUPS, groups, f"{heads}, as num_attention_heads: {norms}")


def _grouping_problems(arguments: ModelArguments) -> list[str]:
    heads = arguments.num_attention_heads
    groups = arguments.num_query_groups
    return [] if heads == groups else [f"num_query_groups is {groups}, not {heads}"]


class OLMoE(FullWidthQKNorm):
    """Experts by softmax in every layer, norms of queries and keys across all heads.

    Names and shapes are those of Megatron-Bridge's own attention (olmoe/olmoe_provider.py of 0.6.2 and commit
    067f987d). Its norm of keys has the width of all query heads, and both norms are whole on each tensor-parallel rank,
    which holds a part of the heads only: neither grouped queries nor tensor parallelism work there.
    """

    model_type = "olmoe"
    spec = "olmoe.olmoe_provider.olmoe_layer_spec"
    architecture = "OlmoeForCausalLM"
    contained_in = "Qwen3-MoE"  # but for the width of its norms, which is checked
    rules = (*parts.DECODER, *parts.QUERY_KEY_NORMS, *parts.experts())
    read_rules = parts.STACKED_EXPERTS
    settings = (
        *llama_like(epsilon=1e-5),
        CheckedKeys(_GROUPS, check=_check_groups),
        Excludes(_grouping_problems),
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

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        return [
            "Megatron-Bridge trains it with tensor_model_parallel_size 1 only: it builds the norms of all queries and "
            "keys on each tensor-parallel rank, which holds a part of them"
        ]
