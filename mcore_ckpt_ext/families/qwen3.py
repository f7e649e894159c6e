"""Qwen3, dense."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import DENSE, NO_WINDOW, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Fixed, Needs


class Qwen3(Family):
    """Like Llama, with norms of each head's queries and keys, and heads of a size of their own."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    rules = (*parts.DECODER, *parts.QUERY_KEY_NORMS)
    settings = (
        *llama_like(head_dim=True), DENSE, NO_WINDOW, Needs({"qk_layernorm": True}),
        Fixed("attention_bias", False, {"add_bias_linear": False, "add_qkv_bias": False}),
        Fixed("use_sliding_window", False, {}),
    )  # fmt: skip
