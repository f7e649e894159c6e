"""Mistral: Llama with a sliding window. One without a window is a Llama in everything but its name."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.arguments import Arguments
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import (
    DENSE,
    PLAIN,
    QUERY_KEY_VALUE,
    RMS_NORM,
    SILU,
    SIZES,
    TRAINING,
    Both,
    Needs,
    Same,
    head_size,
    query_groups,
    rope,
    tied,
    window,
    window_of,
)


def _why_not(arguments: Arguments) -> list[str]:
    return [] if arguments["window_size"] and not arguments["window_attn_skip_freq"] else ["no window in all layers"]


class Mistral(Family):
    """RMS norms, rotary positions, grouped queries, SwiGLU, no biases, and a window over the tokens before."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    rules = (
        parts.EMBEDDING, *parts.attention(), parts.ATTENTION_OUTPUT, *parts.MLP, parts.ATTENTION_NORM,
        *parts.MLP_NORM, *parts.OUTPUT,
    )  # fmt: skip
    settings = (
        *SIZES, query_groups(), head_size(always=True), rope(), tied(by_default=False), *TRAINING, SILU, RMS_NORM,
        Same("rms_norm_eps", "layernorm_epsilon", 1e-6),
        Needs({"add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False}), PLAIN, DENSE, QUERY_KEY_VALUE,
        Both(
            ("sliding_window",),
            lambda arguments: {"sliding_window": window_of(arguments)},
            lambda config: window(config.get("sliding_window", 4096)),
            _why_not,
        ),
    )  # fmt: skip
