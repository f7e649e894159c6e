"""Arcee AFM."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size, query_groups
from mcore_ckpt_ext.families.common_settings import RMS_NORM, SIZES, TRAINING, all_biases_or_none, tied_embeddings
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Constant, Mapped


class Arcee(Family):
    """Like Llama, with a squared ReLU and no gate."""

    model_type = "arcee"
    architecture = "ArceeForCausalLM"
    rules = (
        parts.EMBEDDING,
        *parts.attention(),
        parts.ATTENTION_OUTPUT,
        *parts.MLP_WITHOUT_GATE,
        *parts.BIASES_WITHOUT_GATE,
        parts.ATTENTION_NORM,
        parts.MLP_NORM[0],
        *parts.OUTPUT,
    )
    settings = (
        *SIZES,
        query_groups(),
        head_size(always=True),
        Rope(),
        tied_embeddings(by_default=False),
        *TRAINING,
        RMS_NORM,
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-5),
        Constant("hidden_act", "relu2", {"swiglu": False, "squared_relu": True}),
        all_biases_or_none("attention_bias", "mlp_bias"),
    )
