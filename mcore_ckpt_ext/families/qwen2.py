"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import full_attention, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Needs


class Qwen2(Family):
    """Like Llama, with biases of queries, keys and values; tied in the small models."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    without_effect = ("sliding_window", "max_window_layers")
    rules = (*parts.DECODER, *parts.attention("bias"))
    settings = (
        *llama_like(groups=32),
        full_attention("use_mrope"),
        Needs({"add_bias_linear": False, "add_qkv_bias": True}),
    )
