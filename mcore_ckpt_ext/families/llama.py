"""Llama 2, 3, 3.1, 3.2, 3.3, and other models with its config; XVERSE (same architecture)."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import NO_BIASES, all_biases_or_none, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Requires


class Llama(Family):
    """RMS norms, RoPE (scaled or not), grouped queries, SwiGLU, biases everywhere or nowhere."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    rules = (*parts.DECODER, *parts.BIASES)
    settings = (
        *llama_like(head_dim=True),
        all_biases_or_none("attention_bias", "mlp_bias"),
    )


class Xverse(Family):
    """Llama's code, which XVERSE's folders contain under this name (`modeling_xverse.py`).

    vLLM builds it as Llama (`XverseForCausalLM` in model_executor/models/registry.py). `max_tokenizer_truncation` is
    for its tokenizer.
    """

    model_type = "xverse"
    contained_in = "Llama"
    architecture = "XverseForCausalLM"
    rules = parts.DECODER
    without_effect = ("max_tokenizer_truncation",)
    settings = (*llama_like(), Requires(NO_BIASES))
