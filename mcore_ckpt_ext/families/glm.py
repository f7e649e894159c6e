"""GLM-4-9B for transformers (`THUDM/glm-4-9b-hf`); its first folders are `chatglm`, with own code."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import llama_like
from mcore_ckpt_ext.families.family import Family, set_in
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Mapped, Requires


class Glm(Family):
    """Like Llama, with interleaved RoPE on half a head, biases, and gate and up projection in one matrix.

    Source: transformers/models/glm (5.23).
    """

    model_type = "glm"
    architecture = "GlmForCausalLM"
    rules = (
        parts.EMBEDDING,
        *parts.attention(),
        *parts.attention("bias", set_in("add_qkv_bias")),
        parts.ATTENTION_OUTPUT,
        parts.GATE_AND_UP,
        parts.MLP[-1],
        parts.ATTENTION_NORM,
        parts.MLP_NORM[0],
        *parts.OUTPUT,
    )
    settings = (
        *llama_like(
            epsilon=1.5625e-07,
            head_dim=True,
            head_dim_default=128,
            groups=2,
            positions=Rope(partial=0.5, interleaved=True),
        ),
        Mapped("attention_bias", "add_qkv_bias", True),
        Requires({"add_bias_linear": False}),
    )
