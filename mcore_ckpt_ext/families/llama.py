"""Llama 2, 3, 3.1, 3.2, 3.3, and other models with its config."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Constant


class Llama(Family):
    """RMS norms, RoPE (scaled or not), grouped queries, SwiGLU, no biases; tied or untied embeddings."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    rules = parts.DECODER
    settings = (
        *llama_like(head_dim=True),
        Constant("attention_bias", False, NO_BIASES),
        Constant("mlp_bias", False, {}),
    )  # fmt: skip
