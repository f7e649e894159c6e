"""ChatGLM2 and 3 of 6 billion parameters."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families.common_settings import RMS_NORM
from mcore_ckpt_ext.families.config_checks import Config, checked_divisor, checked_size, contradictory, unrepresentable
from mcore_ckpt_ext.families.family import Family, Rule, set_in
from mcore_ckpt_ext.families.rows import KEY, QUERY, VALUE, concatenate
from mcore_ckpt_ext.families.settings import Constant, Custom, Implies, Mapped, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_OURS = "decoder.layers.{layer}"
_THEIRS = "transformer.encoder.layers.{layer}"
_QKV = concatenate(QUERY, KEY, VALUE)
_GROUPED = "multi_query_attention"
_GROUPS = "multi_query_group_num"
_ROWS = "padded_vocab_size"
_TOKENS = "vocab_size"
_RESIDUAL_AFTER_NORM = "apply_residual_connection_post_layernorm"


def _groups() -> Setting:
    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        return {_GROUPED: True, _GROUPS: arguments.num_query_groups}

    def to_arguments(config: Config) -> dict[str, Any]:
        if not config.get(_GROUPED):
            raise unrepresentable(_GROUPED, config.get(_GROUPED), "True")
        heads = config["num_attention_heads"]
        groups = checked_divisor(_GROUPS, config.get(_GROUPS, 1), heads)
        return {"group_query_attention": groups != heads, "num_query_groups": groups}

    return Custom((_GROUPED, _GROUPS), to_config, to_arguments)


def _vocabulary() -> Setting:
    def to_arguments(config: Config) -> dict[str, Any]:
        rows = checked_size(_ROWS, config.get(_ROWS, 65024), 1 << 40)
        if config.get(_TOKENS, rows) != rows:
            raise contradictory(_TOKENS, config[_TOKENS], f"{rows} as {_ROWS}")
        return {"vocab_size": rows}

    return Custom((_ROWS, _TOKENS), lambda arguments: {_ROWS: arguments.require("vocab_size")}, to_arguments)


class ChatGLM(Family):
    """RoPE on interleaved pairs of half a head; fused query, key and value, fused gate and up projection.

    Its folders contain their own code (`modeling_chatglm.py`). A `rope_ratio` is refused, because its meaning differs
    between folders.
    """

    model_type = "chatglm"
    architecture = "ChatGLMForConditionalGeneration"
    contained_in = "GLM-4-9B"
    left_out = (r"\.rotary_pos_emb\.inv_freq$",)
    rules = (
        Rule("transformer.embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        Rule(f"{_THEIRS}.input_layernorm.weight", f"{_OURS}.self_attention.linear_qkv.layer_norm_weight"),
        Rule(f"{_THEIRS}.self_attention.query_key_value.weight", f"{_OURS}.self_attention.linear_qkv.weight", _QKV),
        Rule(
            f"{_THEIRS}.self_attention.query_key_value.bias",
            f"{_OURS}.self_attention.linear_qkv.bias",
            _QKV,
            set_in("add_qkv_bias"),
        ),
        Rule(f"{_THEIRS}.self_attention.dense.weight", f"{_OURS}.self_attention.linear_proj.weight"),
        Rule(f"{_THEIRS}.post_attention_layernorm.weight", f"{_OURS}.mlp.linear_fc1.layer_norm_weight"),
        Rule(f"{_THEIRS}.mlp.dense_h_to_4h.weight", f"{_OURS}.mlp.linear_fc1.weight"),
        Rule(f"{_THEIRS}.mlp.dense_4h_to_h.weight", f"{_OURS}.mlp.linear_fc2.weight"),
        Rule("transformer.encoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        Rule("transformer.output_layer.weight", "output_layer.weight"),
    )
    # Keys about precision, kernels and prompt tuning (whose weights are not in the folder).
    without_effect = (
        "apply_query_key_layer_scaling",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "fp32_residual_connection",
        "quantization_bit",
        "pre_seq_len",
        "prefix_projection",
    )
    settings = (
        Size("num_layers", "num_layers", 28, counted=True),
        Size("hidden_size", "hidden_size", 4096),
        Size("num_attention_heads", "num_attention_heads", 32, counted=True),
        Size("kv_channels", "kv_channels", 128),
        Size("ffn_hidden_size", "ffn_hidden_size", 13696),
        Size("seq_length", "max_position_embeddings", 2048),
        _vocabulary(),
        _groups(),
        Mapped("layernorm_epsilon", "layernorm_epsilon", 1e-5),
        RMS_NORM,
        Mapped("hidden_dropout", "hidden_dropout", 0.0),
        Mapped("attention_dropout", "attention_dropout", 0.0),
        Mapped("add_qkv_bias", "add_qkv_bias", False),
        Constant("add_bias_linear", False, {"add_bias_linear": False}),
        Constant("rmsnorm", True, {}),
        Constant("post_layer_norm", True, {}),
        Constant(_RESIDUAL_AFTER_NORM, False, {_RESIDUAL_AFTER_NORM: False}),
        Constant("tie_word_embeddings", False, {"untie_embeddings_and_output_weights": True}),
        Constant(
            "original_rope",
            True,
            {
                "position_embedding_type": "rope",
                "rotary_base": 10000,
                "rotary_percent": 0.5,
                "rotary_interleaved": True,
            },
        ),
        Constant("rope_ratio", 1, {}),
        Requires({"swiglu": True}),
        Implies({"init_method_std": 0.02}),
    )
