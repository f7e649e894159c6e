"""StableLM 3B and StableLM 2, except those with norms of queries and keys."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import implied_head_size, query_groups
from mcore_ckpt_ext.families.common_settings import SILU, SIZES, TRAINING, tied
from mcore_ckpt_ext.families.family import Family, set_in
from mcore_ckpt_ext.families.rope import rope
from mcore_ckpt_ext.families.settings import Forbidden, Mapped, Requires


class StableLM(Family):
    """Like Llama, with layer norms, RoPE on a quarter of each head, and optional biases.

    The biases are those of queries, keys and values. Source: transformers/models/stablelm (5.23). StableLM 2 12B has
    parallel blocks and a separate norm for each head, which Megatron does not have.
    """

    model_type = "stablelm"
    architecture = "StableLmForCausalLM"
    rules = (
        parts.EMBEDDING, *parts.attention(), *parts.attention("bias", set_in("add_qkv_bias")), parts.ATTENTION_OUTPUT,
        *parts.MLP, *parts.layer_norms(), parts.OUTPUT[1],
    )  # fmt: skip
    settings = (
        *SIZES, query_groups(32), implied_head_size(), rope(partial=0.25), tied(by_default=False), *TRAINING, SILU,
        Mapped("layer_norm_eps", "layernorm_epsilon", 1e-5), Mapped("hidden_dropout", "hidden_dropout", 0.0),
        Mapped("use_qkv_bias", "add_qkv_bias", False), Forbidden("qk_layernorm", "use_parallel_residual"),
        Requires({"normalization": "LayerNorm", "layernorm_zero_centered_gamma": False, "add_bias_linear": False}),
    )  # fmt: skip
