"""StarCoder2."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size, query_groups, sliding_window
from mcore_ckpt_ext.families.common_settings import SIZES, TRAINING, gelu, tied_embeddings
from mcore_ckpt_ext.families.family import Family, Rule
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Constant, Mapped, Requires

_OURS = "decoder.layers.{layer}"
_THEIRS = "model.layers.{layer}"


def _rules(leaf: str) -> tuple[Rule, ...]:
    return (
        *parts.attention(leaf),
        Rule(f"{_THEIRS}.self_attn.o_proj.{leaf}", f"{_OURS}.self_attention.linear_proj.{leaf}"),
        Rule(f"{_THEIRS}.mlp.c_fc.{leaf}", f"{_OURS}.mlp.linear_fc1.{leaf}"),
        Rule(f"{_THEIRS}.mlp.c_proj.{leaf}", f"{_OURS}.mlp.linear_fc2.{leaf}"),
    )


class StarCoder2(Family):
    """Layer norms, RoPE, grouped queries, GELU, biases everywhere, a sliding window; tied embeddings."""

    model_type = "starcoder2"
    architecture = "Starcoder2ForCausalLM"
    rules = (parts.EMBEDDING, *_rules("weight"), *_rules("bias"), *parts.layer_norms(), parts.OUTPUT[1])
    without_effect = ("embedding_dropout", "norm_type", "mlp_type")
    settings = (
        *SIZES,
        query_groups(2),
        head_size(),
        Rope(),
        tied_embeddings(by_default=True),
        *TRAINING,
        sliding_window(None),
        Mapped("initializer_range", "init_method_std", 0.018042),
        Mapped("norm_epsilon", "layernorm_epsilon", 1e-5),
        Mapped("residual_dropout", "hidden_dropout", 0.0),
        gelu("hidden_act"),
        Constant("use_bias", True, {"add_bias_linear": True, "add_qkv_bias": True}),
        Requires({"normalization": "LayerNorm"}),
    )
