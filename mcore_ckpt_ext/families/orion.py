"""Orion 14B."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import IMPLIED_HEAD_SIZE, query_groups
from mcore_ckpt_ext.families.common_settings import SILU, SIZES, TRAINING, tied_embeddings
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.rope import UnscaledRope
from mcore_ckpt_ext.families.settings import Mapped, Requires


class Orion(Family):
    """Llama with layer norms, whose epsilon is called `rms_norm_eps`.

    Its folders contain their own code (`modeling_orion.py`), which does not read `max_sequence_length`.
    """

    model_type = "orion"
    architecture = "OrionForCausalLM"
    contained_in = "StableLM"
    rules = (
        parts.EMBEDDING,
        *parts.attention(),
        parts.ATTENTION_OUTPUT,
        *parts.MLP,
        *parts.layer_norms(),
        parts.OUTPUT[1],
    )
    without_effect = ("max_sequence_length",)
    settings = (
        *SIZES,
        query_groups(),
        IMPLIED_HEAD_SIZE,
        UnscaledRope(),
        tied_embeddings(by_default=False),
        *TRAINING,
        SILU,
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-5),
        Requires(
            {
                "normalization": "LayerNorm",
                "layernorm_zero_centered_gamma": False,
                "add_bias_linear": False,
                "add_qkv_bias": False,
            }
        ),
    )
