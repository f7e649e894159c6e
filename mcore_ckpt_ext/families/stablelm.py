"""StableLM 3B and StableLM 2, except those with norms of queries and keys."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import IMPLIED_HEAD_SIZE, query_groups
from mcore_ckpt_ext.families.common_settings import SILU, SIZES, TRAINING, tied_embeddings
from mcore_ckpt_ext.families.family import Family, set_in
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Forbidden, Mapped, Requires
from mcore_ckpt_ext.families.unsupported import PARALLEL_BLOCKS

_NORMS_OF_HEADS = "each head of queries and keys has a norm of its own, and in Megatron all heads have the same"


class StableLM(Family):
    """Like Llama, with layer norms, RoPE on a quarter of each head, and optional biases.

    The biases are those of queries, keys and values. StableLM 2 12B has parallel blocks and a separate norm for each
    head, which Megatron does not have. Sources: transformers/models/stablelm (`StableLmLayerNormPerHead`, 5.23);
    `SelfAttention` of megatron/core/transformer/attention.py (core_v0.19.2, and the development head of August 2026).
    """

    model_type = "stablelm"
    architecture = "StableLmForCausalLM"
    rules = (
        parts.EMBEDDING,
        *parts.attention(),
        *parts.attention("bias", set_in("add_qkv_bias")),
        parts.ATTENTION_OUTPUT,
        *parts.MLP,
        *parts.layer_norms(),
        parts.OUTPUT[1],
    )
    settings = (
        *SIZES,
        query_groups(32),
        IMPLIED_HEAD_SIZE,
        Rope(partial=0.25),
        tied_embeddings(by_default=False),
        *TRAINING,
        SILU,
        Mapped("layer_norm_eps", "layernorm_epsilon", 1e-5),
        Mapped("hidden_dropout", "hidden_dropout", 0.0),
        Mapped("use_qkv_bias", "add_qkv_bias", False),
        Forbidden(qk_layernorm=_NORMS_OF_HEADS, use_parallel_residual=PARALLEL_BLOCKS),
        Requires({"normalization": "LayerNorm", "layernorm_zero_centered_gamma": False, "add_bias_linear": False}),
    )
