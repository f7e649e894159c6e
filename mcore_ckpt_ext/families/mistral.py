"""Mistral: Llama with a sliding window. One without a window is a Llama in everything but its name."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.arguments import Arguments
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import DENSE, Needs, llama_like, sliding_window


def _why_not(arguments: Arguments) -> list[str]:
    return [] if arguments["window_size"] and not arguments["window_attn_skip_freq"] else ["no window in all layers"]


class Mistral(Family):
    """RMS norms, rotary positions, grouped queries, SwiGLU, no biases, and a window over the tokens before."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    rules = parts.DECODER
    settings = (
        *llama_like(head_dim=True), DENSE, sliding_window(4096, _why_not),
        Needs({"add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False}),
    )  # fmt: skip
