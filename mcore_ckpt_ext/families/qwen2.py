"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import DENSE, NO_WINDOW, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Fixed, Needs


class Qwen2(Family):
    """Like Llama, with biases of queries, keys and values; tied in the small models."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    rules = (*parts.DECODER, *parts.attention("bias"))
    settings = (
        *llama_like(), DENSE, NO_WINDOW, Fixed("use_sliding_window", False, {}),
        Needs({"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": False}),
    )  # fmt: skip
