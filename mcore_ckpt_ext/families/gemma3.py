"""Gemma 3 (language model)."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size, query_groups, windows_in_some_layers
from mcore_ckpt_ext.families.common_settings import NO_BIASES, SIZES, TRAINING, gelu
from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.gemma2 import RULES, attention_scalar, query_scalar
from mcore_ckpt_ext.families.rope import base_of, rope_parameters
from mcore_ckpt_ext.families.settings import Constant, Custom, Forbidden, Mapped, Requires, Setting
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_GLOBAL = "full_attention"
_LOCAL = "sliding_attention"
_EVERY = 6  # `interleaved_attn_pattern` of the provider: five layers with a window, one without


def _rope() -> Setting:
    """Return the setting of RoPE: one base for windowed layers, another, perhaps scaled, for the others."""

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        factor = arguments.rotary_seq_len_interpolation_factor
        scaling = {"rope_type": "linear", "factor": float(factor)} if factor else {"rope_type": "default"}
        return {
            "rope_parameters": {
                _LOCAL: {"rope_type": "default", "rope_theta": float(arguments.rotary_base_local or 10000.0)},
                _GLOBAL: {**scaling, "rope_theta": float(arguments.rotary_base)},
            }
        }

    def to_arguments(config: Config) -> dict[str, Any]:
        of_layers = config.get("rope_parameters") or {}
        # The class does not read other keys there (`convert_rope_params_to_dict`, transformers 5.23).
        if not isinstance(of_layers, Mapping) or not {*of_layers} <= {_LOCAL, _GLOBAL}:
            raise unrepresentable("rope_parameters", of_layers, f"keys {_LOCAL} and {_GLOBAL}")
        if of_layers:
            outer = {key: config[key] for key in ("rope_theta", "rope_scaling") if config.get(key)}
            of_windows = {"rope_theta": config["rope_local_base_freq"]} if config.get("rope_local_base_freq") else {}
            local = rope_parameters({**of_windows, "rope_parameters": of_layers.get(_LOCAL)})
            global_parameters = rope_parameters({**outer, "rope_parameters": of_layers.get(_GLOBAL)}, 1000000.0)
        else:  # until transformers 4
            local = rope_parameters({"rope_theta": config.get("rope_local_base_freq", 10000.0)})
            global_parameters = rope_parameters(config, 1000000.0)
        kind = global_parameters["rope_type"]
        factor = global_parameters.get("factor")
        if local["rope_type"] != "default" or kind not in ("default", "linear"):
            raise unrepresentable(
                "rope_parameters", f"{local['rope_type']} and {kind}", "default, and default or linear"
            )
        return {
            "position_embedding_type": "rope",
            "rotary_base": base_of(global_parameters),
            "rotary_base_local": base_of(local),
            "rotary_seq_len_interpolation_factor": factor if kind == "linear" else None,
        }

    expressed = (
        "position_embedding_type",
        "rotary_base",
        "rotary_base_local",
        "rotary_seq_len_interpolation_factor",
    )
    return Custom(
        ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"),
        to_config,
        to_arguments,
        expressed=expressed,
    )


class Gemma3(Family):
    """Gemma 2 with norms of queries and keys per head, other windows and positions, and no soft-capping.

    The names are those of Megatron-Bridge's provider (gemma/gemma3_provider.py, commit 067f987d).
    """

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    bridge_only_reason = "Megatron Core has no norms after a block, no scaled embeddings and no second kind of RoPE"
    bridge_provider = "gemma.gemma3_provider.Gemma3ModelProvider"
    rules = (*RULES, *parts.QUERY_KEY_NORMS)
    defaults = {
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    }
    without_effect = ("hidden_act", "_sliding_window_pattern")
    settings = (
        *SIZES,
        query_groups(4),
        head_size(always=True, default=256),
        _rope(),
        *TRAINING,
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-6),
        windows_in_some_layers(4096, _EVERY, "sliding_window_pattern"),
        Constant("tie_word_embeddings", True, {"untie_embeddings_and_output_weights": False}),
        Constant("attention_bias", False, NO_BIASES),
        gelu("hidden_activation", needed={"gated_linear_unit": True}),
        query_scalar(),
        Forbidden("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
        Requires(
            {
                "normalization": "RMSNorm",
                "layernorm_zero_centered_gamma": True,
                "qk_layernorm": True,
                "scaled_embeddings": True,
                "attention_softcap": None,
                "final_logit_softcap": None,
            }
        ),
    )

    @override
    def bridge_fields(self, arguments: ModelArguments) -> dict[str, Any]:
        window = arguments.window_size
        return {
            "rotary_base": [arguments.rotary_base_local or 10000, arguments.rotary_base],
            "rope_scaling_factor": arguments.rotary_seq_len_interpolation_factor or 1.0,
            "window_size": None if window is None else window[0] + 1,  # the provider includes the token itself
            "softmax_scale": 1.0 / sqrt(attention_scalar(arguments)),
        }
