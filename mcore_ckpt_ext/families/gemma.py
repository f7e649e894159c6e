"""Gemma 1, CodeGemma."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size, query_groups
from mcore_ckpt_ext.families.common_settings import NO_BIASES, SIZES, TRAINING
from mcore_ckpt_ext.families.config_checks import Config, mismatches, unrepresentable
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Constant, Custom, Forbidden, Mapped, Requires, Setting
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_APPROXIMATION = "gelu_pytorch_tanh"


def _activation() -> Setting:
    """Return the setting of the activation: GELU approximated by tanh, even if it is named exact GELU.

    Published folders name the exact function, which `GemmaConfig.__post_init__` (transformers 5.23) replaces. Releases
    4.39 to 4.48 read the key `hidden_activation` instead.
    """
    needed = {"gated_linear_unit": True, "swiglu": False, "bias_gelu_fusion": True}

    def to_arguments(config: Config) -> dict[str, Any]:
        for key, accepted in (("hidden_act", ("gelu", _APPROXIMATION)), ("hidden_activation", (_APPROXIMATION,))):
            if config.get(key) not in (None, *accepted):
                raise unrepresentable(key, config[key], _APPROXIMATION)
        return dict(needed)

    def why_not(arguments: ModelArguments) -> list[str]:
        return mismatches(needed, arguments)

    keys = ("hidden_act", "hidden_activation")
    return Custom(keys, lambda arguments: {"hidden_act": _APPROXIMATION}, to_arguments, why_not, (*needed,))


class Gemma(Family):
    """Norms that multiply by 1 + weight, scaled embeddings, gated GELU, tied embeddings.

    Sources: transformers/models/gemma (5.23); gemma/gemma_provider.py of Megatron-Bridge (067f987d).
    """

    model_type = "gemma"
    architecture = "GemmaForCausalLM"
    bridge_only_reason = "Megatron's parser has no flag for GELU with a gate, and Megatron Core no scaled embeddings"
    bridge_provider = "gemma.gemma_provider.GemmaModelProvider"
    rules = parts.DECODER
    settings = (
        *SIZES,
        query_groups(16),
        head_size(always=True, default=256),
        Rope(),
        *TRAINING,
        _activation(),
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-6),
        Constant("tie_word_embeddings", True, {"untie_embeddings_and_output_weights": False}),
        Constant("attention_bias", False, NO_BIASES),
        Forbidden("use_bidirectional_attention"),
        Requires({"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True, "scaled_embeddings": True}),
    )
