"""Nemotron 3 8B, Nemotron 4 and Minitron."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size, query_groups
from mcore_ckpt_ext.families.common_settings import SIZES, TRAINING, all_biases_or_none, tied_embeddings
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Constant, Mapped, Requires


class Nemotron(Family):
    """Layer norms that multiply by 1 + weight, RoPE on half of each head, squared ReLU without a gate.

    Sources: transformers/models/nemotron (5.23), `NemotronLayerNorm1P`; nemotron/nemotron_bridge.py of Megatron-Bridge
    (067f987d).
    """

    model_type = "nemotron"
    architecture = "NemotronForCausalLM"
    rules = (
        parts.EMBEDDING,
        *parts.attention(),
        parts.ATTENTION_OUTPUT,
        *parts.MLP_WITHOUT_GATE,
        *parts.BIASES_WITHOUT_GATE,
        *parts.layer_norms(),
        parts.OUTPUT[1],
    )
    settings = (
        *SIZES,
        query_groups(),
        head_size(always=True),
        Rope(partial=0.5),
        tied_embeddings(by_default=False),
        *TRAINING,
        Mapped("initializer_range", "init_method_std", 0.0134),
        Mapped("norm_eps", "layernorm_epsilon", 1e-5),
        Constant("hidden_act", "relu2", {"swiglu": False, "squared_relu": True}),
        all_biases_or_none("attention_bias", "mlp_bias"),
        Requires({"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True}),
    )
