"""K-EXAONE."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import layers_with_window, windows_in_some_layers
from mcore_ckpt_ext.families.common_settings import llama_like
from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.deepseek import (
    grouped_choice,
    listed_dense_first,
    normalized_sigmoids,
    scaled_gates,
    shared_experts,
)
from mcore_ckpt_ext.families.family import Family, Rule, with_experts
from mcore_ckpt_ext.families.settings import Custom, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_BIAS = "decoder.layers.{layer}.mlp.router.expert_bias"
_WIDTH = 4096
_WINDOW = "sliding_window"
_PATTERN = "sliding_window_pattern"
_KINDS = "layer_types"


def _windows() -> Setting:
    """Return the setting of a sliding window in some layers, and no positions in others.

    Source: `ExaoneMoeAttention`.
    """
    usual = windows_in_some_layers(_WIDTH, 4, _PATTERN)

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        config = usual.config(arguments)
        return config if arguments.no_rope_freq else {**config, _WINDOW: None}

    def to_arguments(config: Config) -> dict[str, Any]:
        if isinstance(config.get(_PATTERN), str):  # one letter per layer; `layer_types` has the full names
            if config.get(_KINDS) is None:
                raise unrepresentable(_PATTERN, config[_PATTERN], "a whole number, or layer_types")
            config = {key: value for key, value in config.items() if key != _PATTERN}
        windows = usual.arguments(config)
        sees = layers_with_window(windows["window_size"], windows["window_attn_skip_freq"], config["num_hidden_layers"])
        has_positions_everywhere = config.get(_WINDOW, _WIDTH) is None
        return {
            **windows,
            "no_rope_freq": None if has_positions_everywhere else [int(not is_windowed) for is_windowed in sees],
        }

    def why_not(arguments: ModelArguments) -> list[str]:
        layers = range(arguments.num_layers)
        skipped = arguments.no_rope_freq
        if isinstance(skipped, int):
            skipped = [int((layer + 1) % skipped == 0) for layer in layers]
        sees = layers_with_window(arguments.window_size, arguments.window_attn_skip_freq, arguments.num_layers)
        expected = [int(not is_windowed) for is_windowed in sees] if skipped or any(sees) else None
        as_expected = expected == (list(skipped) if skipped else None)
        return usual.mismatches(arguments) + (
            [] if as_expected else ["positions in other layers than those with a window"]
        )

    return Custom(usual.keys, to_config, to_arguments, why_not, (*usual.expresses, "no_rope_freq"))


class ExaoneMoE(Family):
    """DeepSeek-V3's experts, norms of queries and keys; positions only in layers with a sliding window.

    Sources: transformers/models/exaone_moe (5.23), and conversion_mapping.py for the names of released tensors;
    exaone/exaone_moe of Megatron-Bridge (067f987d).
    """

    model_type = "exaone_moe"
    architecture = "ExaoneMoeForCausalLM"
    rules = (
        *parts.DECODER,
        *parts.QUERY_KEY_NORMS,
        *parts.experts(),
        *parts.shared_experts("shared_experts"),
        Rule("model.layers.{layer}.mlp.e_score_correction_bias", _BIAS, where=with_experts, keeps_dtype=True),
    )
    read_rules = (*parts.STACKED_EXPERTS, parts.EXPERT_BIAS)
    # Its MTP layer has no experts, but Megatron builds an MTP layer like the last layer of the decoder.
    left_out = (*Family.left_out, r"^mtp\.")
    without_effect = ("num_nextn_predict_layers",)
    settings = (
        *llama_like(epsilon=1e-5, groups=32),
        _windows(),
        Size("num_experts", "num_experts", 64, counted=True),
        shared_experts("num_shared_experts", 1),
        Size("num_experts_per_tok", "moe_router_topk", 8),
        Size("moe_intermediate_size", "moe_ffn_hidden_size", 1024),
        listed_dense_first(1),
        grouped_choice(1, 1),
        normalized_sigmoids(8),
        scaled_gates(2.5),
        Requires(
            {
                "add_bias_linear": False,
                "add_qkv_bias": False,
                "qk_layernorm": True,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
            }
        ),
    )
