"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import (
    DENSE,
    NO_WINDOW,
    PLAIN,
    QUERY_KEY_VALUE,
    RMS_NORM,
    SILU,
    SIZES,
    TRAINING,
    Fixed,
    Needs,
    Same,
    head_size,
    query_groups,
    rope,
    tied,
)


class Qwen2(Family):
    """As Llama, with biases of queries, keys and values; tied in the small models."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    rules = (
        parts.EMBEDDING, *parts.attention(), *parts.attention("bias"), parts.ATTENTION_OUTPUT, *parts.MLP,
        parts.ATTENTION_NORM, *parts.MLP_NORM, *parts.OUTPUT,
    )  # fmt: skip
    settings = (
        *SIZES, query_groups(), head_size(), rope(), tied(by_default=False), *TRAINING, SILU, RMS_NORM,
        Same("rms_norm_eps", "layernorm_epsilon", 1e-6),
        Needs({"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": False}), PLAIN, DENSE, QUERY_KEY_VALUE,
        NO_WINDOW, Fixed("use_sliding_window", False, {}),
    )  # fmt: skip
