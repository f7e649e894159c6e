"""ERNIE 4.5, dense."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size, query_groups
from mcore_ckpt_ext.families.common_settings import (
    INITIAL,
    RMS_NORM,
    SILU,
    SIZES,
    all_biases_or_none,
    tied_embeddings,
)
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Mapped


class Ernie45(Family):
    """Like Llama, with interleaved RoPE, an explicit head size, and tied embeddings."""

    model_type = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    rules = (*parts.DECODER, *parts.BIASES)
    without_effect = ("compression_ratio", "freq_allocation", "use_rmsnorm", "micro_batch_size", "use_recompute")
    settings = (
        *SIZES,
        query_groups(2),
        head_size(always=True, default=128),
        Rope(500000.0, interleaved=True),
        tied_embeddings(by_default=True),
        *INITIAL,
        SILU,
        RMS_NORM,
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-5),
        all_biases_or_none("use_bias"),
    )
