"""Ling 2.0 and Ring 2.0 (Bailing MoE V2)."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import llama_like
from mcore_ckpt_ext.families.deepseek import dense_first, grouped_choice, normalized_sigmoids, scaled_gates
from mcore_ckpt_ext.families.deepseek import shared_experts as shared_expert_size
from mcore_ckpt_ext.families.deepseek_v3 import WithMtp, mtp_layers
from mcore_ckpt_ext.families.family import Rule, set_in, with_experts
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.rows import KEY, QUERY, VALUE, concatenate
from mcore_ckpt_ext.families.settings import Constant, Mapped, Setting, Size

_OURS = "decoder.layers.{layer}"
_THEIRS = "model.layers.{layer}"
_QKV = concatenate(QUERY, KEY, VALUE)
RULES = (
    Rule("model.word_embeddings.weight", "embedding.word_embeddings.weight"),
    Rule(f"{_THEIRS}.attention.query_key_value.weight", f"{_OURS}.self_attention.linear_qkv.weight", _QKV),
    Rule(
        f"{_THEIRS}.attention.query_key_value.bias",
        f"{_OURS}.self_attention.linear_qkv.bias",
        _QKV,
        set_in("add_qkv_bias"),
    ),
    Rule(f"{_THEIRS}.attention.query_layernorm.weight", f"{_OURS}.self_attention.q_layernorm.weight"),
    Rule(f"{_THEIRS}.attention.key_layernorm.weight", f"{_OURS}.self_attention.k_layernorm.weight"),
    Rule(f"{_THEIRS}.attention.dense.weight", f"{_OURS}.self_attention.linear_proj.weight"),
    *parts.MLP,
    *parts.experts(),
    Rule(f"{_THEIRS}.mlp.gate.expert_bias", f"{_OURS}.mlp.router.expert_bias", where=with_experts, keeps_dtype=True),
    *parts.shared_experts("shared_experts"),
    parts.ATTENTION_NORM,
    *parts.MLP_NORM,
    *parts.OUTPUT,
)


# What the code of Ling and of Sarvam does not read, or only to compute a loss.
WITHOUT_EFFECT = (
    "embedding_dropout",
    "output_dropout",
    "rotary_dim",
    "router_dtype",
    "use_rmsnorm",
    "max_window_layers",
    "sliding_window",
    "use_sliding_window",
    "moe_shared_expert_intermediate_size",
    "scoring_func",
)


def settings_of_ling(
    *, head: int, positions: Setting, experts: tuple[int, int, int], groups: tuple[int, int], scaling: float
) -> tuple[Setting, ...]:
    """The settings of Ling 2.0, and of Sarvam 30B, which is derived from it.

    The numbers are the defaults of the class.

    Args:
        head: the size of a head.
        positions: the setting of RoPE.
        experts: how many, how many of them for each token, and their width.
        groups: the groups of experts, and how many of them a token is sent to.
        scaling: the factor on the chosen experts' weights.
    """
    count, chosen, width = experts
    return (
        *llama_like(head_dim=True, head_dim_default=head, groups=4, positions=positions),
        Size("num_experts", "num_experts", count, counted=True),
        shared_expert_size("num_shared_experts", 1),
        Size("num_experts_per_tok", "moe_router_topk", chosen),
        Size("moe_intermediate_size", "moe_ffn_hidden_size", width),
        dense_first(1),
        grouped_choice(*groups),
        normalized_sigmoids(chosen),
        scaled_gates(scaling),
        Constant("score_function", "sigmoid", {"moe_router_score_function": "sigmoid"}),
        Constant("moe_router_enable_expert_bias", True, {"moe_router_enable_expert_bias": True}),
        Constant("use_qk_norm", True, {"qk_layernorm": True}),
        Mapped("use_qkv_bias", "add_qkv_bias", False),
        Constant("use_bias", False, {"add_bias_linear": False}),
    )


class BailingMoeV2(WithMtp):
    """GLM-4.5's architecture with other names, and queries, keys and values in one matrix.

    Its folders contain their own code (`modeling_bailing_moe_v2.py`), which Megatron-Bridge 0.6.2 also has. Names and
    rows agree with its mapping (bailing/bailing_moe2_bridge.py).
    """

    model_type = "bailing_moe_v2"
    architecture = "BailingMoeV2ForCausalLM"
    contained_in = "GLM-4.5"
    rules = (*RULES, *parts.mtp_layers(RULES, final_norm="final_layernorm"))
    repeated = ()
    without_effect = (*WITHOUT_EFFECT, "mtp_loss_scaling_factor")
    settings = (
        *settings_of_ling(
            head=128, positions=Rope(600000.0, partial=1.0), experts=(256, 8, 512), groups=(8, 4), scaling=1.0
        ),
        mtp_layers(),
    )


class BailingMoE(BailingMoeV2):
    """`BailingMoeV2` with the `model_type` of Ling 2.0's folders.

    The first Ling has this type, too, but other tensors.
    """

    model_type = "bailing_moe"
