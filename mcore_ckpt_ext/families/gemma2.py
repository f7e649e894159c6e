"""Gemma 2."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size, query_groups, windows_in_some_layers
from mcore_ckpt_ext.families.common_settings import NO_BIASES, SIZES, TRAINING, gelu
from mcore_ckpt_ext.families.family import Family, Rule
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Constant, Custom, Forbidden, Mapped, Nullable, Requires, Setting
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_OURS = "decoder.layers.{layer}"
_THEIRS = "model.layers.{layer}"


def query_scalar() -> Setting:
    """Return the setting of `query_pre_attn_scalar`.

    Its square root divides the products of queries and keys.
    """
    return Custom(
        ("query_pre_attn_scalar",),
        lambda arguments: {"query_pre_attn_scalar": attention_scalar(arguments)},
        lambda config: {"softmax_scale": config.get("query_pre_attn_scalar", 256) ** -0.5},
        expressed=("softmax_scale",),
    )


def attention_scalar(arguments: ModelArguments) -> float:
    """Return the `query_pre_attn_scalar` of a job, as an integer if possible."""
    scale = arguments.softmax_scale or arguments.kv_channels**-0.5
    scalar = round(scale**-2, 6)
    return int(scalar) if scalar == int(scalar) else scalar


NORMS_AFTER_BLOCKS = (
    Rule(f"{_THEIRS}.post_attention_layernorm.weight", f"{_OURS}.self_attention.linear_proj.post_layernorm.weight"),
    Rule(f"{_THEIRS}.post_feedforward_layernorm.weight", f"{_OURS}.mlp.linear_fc2.post_layernorm.weight"),
)
RULES = (
    parts.EMBEDDING,
    *parts.attention(),
    parts.ATTENTION_OUTPUT,
    *parts.MLP,
    parts.ATTENTION_NORM,
    *NORMS_AFTER_BLOCKS,
    Rule(f"{_THEIRS}.pre_feedforward_layernorm.weight", f"{_OURS}.mlp.linear_fc1.layer_norm_weight"),
    Rule("model.norm.weight", "decoder.final_layernorm.weight"),
)


class Gemma2(Family):
    """Norms before and after attention and MLP, soft-capped logits, scaled and tied embeddings.

    Megatron Core's `GPTModel` has none of the first three. The names are those of Megatron-Bridge's provider, in which
    a norm after a block is part of the preceding linear layer (`TERowParallelLinearLayerNorm`,
    gemma/gemma2_provider.py).
    """

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    bridge_only_reason = "Megatron Core has no norms after a block, no logit soft-capping and no scaled embeddings"
    bridge_provider = "gemma.gemma2_provider.Gemma2ModelProvider"
    bridge_lacks = ("softmax_scale",)  # its attention reads `query_pre_attn_scalar`
    rules = RULES
    without_effect = ("hidden_act", "sliding_window_size")  # `hidden_activation` and `sliding_window` are used instead
    settings = (
        *SIZES,
        query_groups(4),
        head_size(always=True, default=256),
        Rope(),
        *TRAINING,
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-6),
        # The norms multiply by 1 + weight.
        Requires({"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True}),
        Constant("tie_word_embeddings", True, {"untie_embeddings_and_output_weights": False}),
        Constant("attention_bias", False, NO_BIASES),
        gelu("hidden_activation", needed={"gated_linear_unit": True}),
        windows_in_some_layers(4096, every=2),
        query_scalar(),
        Nullable("attn_logit_softcapping", "attention_softcap", 50.0),
        Nullable("final_logit_softcapping", "final_logit_softcap", 30.0),
        Forbidden("use_bidirectional_attention"),
        Requires({"scaled_embeddings": True}),
    )

    @override
    def bridge_fields(self, arguments: ModelArguments) -> dict[str, Any]:
        return {
            "query_pre_attn_scalar": attention_scalar(arguments),
            "attn_logit_softcapping": arguments.attention_softcap,
            "final_logit_softcapping": arguments.final_logit_softcap,
        }
