"""GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_ckpt_ext.families.attention_settings import IMPLIED_HEAD_SIZE, NO_QUERY_GROUPS
from mcore_ckpt_ext.families.common_settings import gelu, tied_embeddings
from mcore_ckpt_ext.families.config_checks import Config
from mcore_ckpt_ext.families.family import Family, Rule, untied
from mcore_ckpt_ext.families.rows import KEY, QUERY, VALUE, WHOLE, Rows, concatenate, transpose
from mcore_ckpt_ext.families.settings import Constant, Custom, Implies, Mapped, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_OURS = "decoder.layers.{layer}"
_THEIRS = "transformer.h.{layer}"
_QKV = concatenate(QUERY, KEY, VALUE)


def _inner(arguments: ModelArguments) -> dict[str, Any]:
    size = arguments.ffn_hidden_size
    return {"n_inner": None if size == 4 * arguments.hidden_size else size}


def _inner_size(config: Config) -> dict[str, Any]:
    return {"ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"]}


def rules(qkv: Rows, matrix: Callable[[Rows], Rows] = lambda rows: rows) -> tuple[Rule, ...]:
    """Return all rules.

    Args:
        qkv: rows of `c_attn`.
        matrix: converts rows to the storage of matrices.
    """

    def rules_of_layer(leaf: str, stored: Callable[[Rows], Rows]) -> tuple[Rule, ...]:
        return (
            Rule(f"{_THEIRS}.ln_1.{leaf}", f"{_OURS}.self_attention.linear_qkv.layer_norm_{leaf}"),
            Rule(f"{_THEIRS}.attn.c_attn.{leaf}", f"{_OURS}.self_attention.linear_qkv.{leaf}", stored(qkv)),
            Rule(f"{_THEIRS}.attn.c_proj.{leaf}", f"{_OURS}.self_attention.linear_proj.{leaf}", stored(WHOLE)),
            Rule(f"{_THEIRS}.ln_2.{leaf}", f"{_OURS}.mlp.linear_fc1.layer_norm_{leaf}"),
            Rule(f"{_THEIRS}.mlp.c_fc.{leaf}", f"{_OURS}.mlp.linear_fc1.{leaf}", stored(WHOLE)),
            Rule(f"{_THEIRS}.mlp.c_proj.{leaf}", f"{_OURS}.mlp.linear_fc2.{leaf}", stored(WHOLE)),
        )

    return (
        Rule("transformer.wte.weight", "embedding.word_embeddings.weight"),
        Rule("transformer.wpe.weight", "embedding.position_embeddings.weight"),
        *rules_of_layer("weight", matrix),
        *rules_of_layer("bias", lambda rows: rows),
        Rule("transformer.ln_f.weight", "decoder.final_layernorm.weight"),
        Rule("transformer.ln_f.bias", "decoder.final_layernorm.bias"),
        Rule("lm_head.weight", "output_layer.weight", where=untied),
    )


def settings(activation: str) -> tuple[Setting, ...]:
    """Return all settings except those of queries, keys and values; `activation` is the class's default."""
    return (
        Size("n_layer", "num_layers", counted=True),
        Size("n_embd", "hidden_size"),
        Size("n_head", "num_attention_heads", counted=True),
        Size("n_positions", "max_position_embeddings", 1024),
        Size("vocab_size", "vocab_size", 50257),
        Mapped("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
        Mapped("initializer_range", "init_method_std", 0.02),
        Mapped("attn_pdrop", "attention_dropout", 0.1),
        Mapped("resid_pdrop", "hidden_dropout", 0.1),
        Custom(("embd_pdrop",), lambda arguments: {"embd_pdrop": arguments.hidden_dropout}, lambda config: {}),
        Custom(("n_inner",), _inner, _inner_size),
        IMPLIED_HEAD_SIZE,
        gelu("activation_function", activation),
        tied_embeddings(by_default=True),
        Constant("scale_attn_weights", True, {}),
        Constant("add_cross_attention", False, {}),
        Implies({"add_qkv_bias": True}),
        Requires(
            {
                "normalization": "LayerNorm",
                "add_bias_linear": True,
                "position_embedding_type": "learned_absolute",
            }
        ),
    )


class GPT2(Family):
    """Layer norms, learned positions, biases everywhere, mostly tied embeddings, transposed matrices."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    without_effect = (
        "n_ctx",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    )
    left_out = (r"\.attn\.(bias|masked_bias)$",)
    rules = rules(_QKV, transpose)
    settings = (*settings("gelu_new"), NO_QUERY_GROUPS, Constant("scale_attn_by_inverse_layer_idx", False, {}))
