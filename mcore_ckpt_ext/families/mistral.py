"""Mistral with a sliding window (without one, since 0.2, it is converted as Llama)."""

from __future__ import annotations

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import sliding_window
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Forbidden, Requires
from mcore_ckpt_ext.job.model_arguments import ModelArguments


class Mistral(Family):
    """RMS norms, RoPE, grouped queries, SwiGLU, no biases, and a sliding window."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    rules = parts.DECODER
    settings = (
        *llama_like(head_dim=True, groups=8),
        sliding_window(4096),
        Forbidden("attention_bias", "mlp_bias"),
        Requires(NO_BIASES),
    )

    @override
    def prefer_other_family(self, arguments: ModelArguments) -> list[str]:
        return [] if arguments.window_size else ["no window, like Llama"]
