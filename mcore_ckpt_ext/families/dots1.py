"""dots.llm1."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import check_kinds_of_attention
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.deepseek import (
    dense_first,
    expert_sizes,
    grouped_choice,
    normalized_sigmoids,
    scaled_gates,
)
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Constant, Custom, Requires, Setting

_WINDOW = "sliding_window"
_FIRST = "max_window_layers"
_KINDS = "layer_types"


def _full_attention() -> Setting:
    """Return the setting without windows, which begin behind the first `max_window_layers` layers."""

    def to_arguments(config: Config) -> dict[str, Any]:
        first = config.get(_FIRST, 62)
        begins = config.get(_WINDOW, 4096) is not None and first < config["num_hidden_layers"]
        if config.get(_KINDS) is None and begins:
            raise unrepresentable(_FIRST, first, f"{config['num_hidden_layers']} or more, or sliding_window: null")
        check_kinds_of_attention(config, "full_attention")
        return {}

    return Custom((_WINDOW, _FIRST, _KINDS), lambda arguments: {_WINDOW: None}, to_arguments)


class Dots1(Family):
    """DeepSeek-V3's experts behind Qwen3's attention.

    Source: transformers/models/dots1 (5.23). Its router always adds a trained bias and always takes sigmoids.
    """

    model_type = "dots1"
    architecture = "Dots1ForCausalLM"
    rules = (
        *parts.DECODER,
        *parts.QUERY_KEY_NORMS,
        *parts.experts(),
        *parts.shared_experts("shared_experts"),
        parts.EXPERT_BIAS,
    )
    read_rules = parts.STACKED_EXPERTS
    without_effect = ("scoring_func", "topk_method")
    settings = (
        *llama_like(head_dim=True, groups=32),
        *expert_sizes(),
        dense_first(0),
        grouped_choice(1, 1),
        normalized_sigmoids(1, absent=False),
        scaled_gates(1.0),
        _full_attention(),
        Constant("attention_bias", False, NO_BIASES),
        Requires(
            {
                "qk_layernorm": True,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
            }
        ),
    )
