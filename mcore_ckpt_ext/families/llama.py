"""Llama 2, 3, 3.1, 3.2, 3.3, and other models with its config."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import all_biases_or_none, llama_like
from mcore_ckpt_ext.families.family import Family


class Llama(Family):
    """RMS norms, RoPE (scaled or not), grouped queries, SwiGLU, biases everywhere or nowhere."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    rules = (*parts.DECODER, *parts.BIASES)
    settings = (
        *llama_like(head_dim=True),
        all_biases_or_none("attention_bias", "mlp_bias"),
    )
