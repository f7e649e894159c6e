"""InternLM3."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Constant, Forbidden


class InternLM3(Family):
    """Llama with another name; transformers builds and saves it as Llama."""

    model_type = "internlm3"
    contained_in = "Llama"
    architecture = "InternLM3ForCausalLM"
    alternative_architecture = "LlamaForCausalLM"
    rules = parts.DECODER
    settings = (
        *llama_like(epsilon=1e-5, head_dim=True, head_dim_default=128, groups=2),
        Constant("attention_bias", False, NO_BIASES),
        Forbidden("mlp_bias", "qkv_bias", "bias"),
    )
