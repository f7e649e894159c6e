"""Qwen3, dense."""

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


class Qwen3(Family):
    """As Llama, with norms of each head's queries and keys, and heads of a size of their own."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    rules = (
        parts.EMBEDDING, *parts.attention(), parts.ATTENTION_OUTPUT, *parts.QUERY_KEY_NORMS, *parts.MLP,
        parts.ATTENTION_NORM, *parts.MLP_NORM, *parts.OUTPUT,
    )  # fmt: skip
    settings = (
        *SIZES, query_groups(), head_size(always=True), rope(), tied(by_default=False), *TRAINING, SILU, RMS_NORM,
        Same("rms_norm_eps", "layernorm_epsilon", 1e-6),
        Fixed("attention_bias", False, {"add_bias_linear": False, "add_qkv_bias": False}),
        Needs({"qk_layernorm": True}), PLAIN, DENSE, QUERY_KEY_VALUE, NO_WINDOW,
        Fixed("use_sliding_window", False, {}),
    )  # fmt: skip
