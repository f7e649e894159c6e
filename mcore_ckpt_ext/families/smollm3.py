"""SmolLM3."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import full_attention, has_window, query_groups
from mcore_ckpt_ext.families.common_settings import (
    RMS_NORM,
    SILU,
    SIZES,
    TRAINING,
    all_biases_or_none,
    tied_embeddings,
)
from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Custom, Mapped
from mcore_ckpt_ext.job.model_arguments import ModelArguments


def _rotary_pattern(arguments: ModelArguments) -> dict[str, Any]:
    """Return 1 for each layer with RoPE; in Megatron's pattern, 1 is a layer without."""
    pattern = arguments.no_rope_freq or [0]
    layers = range(arguments.num_layers)
    if isinstance(pattern, int):
        pattern = [*([0] * (pattern - 1)), 1]
    return {"no_rope_layers": [1 - pattern[layer % len(pattern)] for layer in layers]}


def _layers_without_rope(config: Config) -> dict[str, Any]:
    interval = config.get("no_rope_layer_interval", 4)
    layers = range(config["num_hidden_layers"])
    rotated = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in layers]
    if len(rotated) < len(layers):
        raise unrepresentable("no_rope_layers", rotated, f"an entry for each of {quantity(len(layers), 'layer')}")
    rotated = rotated[: len(layers)]  # further entries have no layer
    return {"no_rope_freq": [1 - int(bool(is_rotated)) for is_rotated in rotated]}


class SmolLM3(Family):
    """Like Llama, but some layers, by default every fourth, have no positions; tied embeddings."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    rules = (*parts.DECODER, *parts.BIASES)
    without_effect = ("sliding_window", "max_window_layers", "no_rope_layer_interval")
    settings = (
        *SIZES,
        query_groups(4),
        Rope(2000000.0),
        tied_embeddings(by_default=True),
        *TRAINING,
        SILU,
        RMS_NORM,
        full_attention(reaches=has_window(None)),
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-6),
        all_biases_or_none("attention_bias", "mlp_bias"),
        Custom(
            ("no_rope_layers",),
            _rotary_pattern,
            _layers_without_rope,
            expressed=("no_rope_freq",),
            why_not=lambda arguments: [] if arguments.no_rope_freq else ["positions in every layer"],
        ),
    )
