"""Qwen, the first."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.families.attention_settings import IMPLIED_HEAD_SIZE, NO_QUERY_GROUPS
from mcore_ckpt_ext.families.common_settings import RMS_NORM
from mcore_ckpt_ext.families.config_checks import Config, checked_size, contradictory
from mcore_ckpt_ext.families.family import Family, Rule
from mcore_ckpt_ext.families.rope import exact_up_to
from mcore_ckpt_ext.families.rows import GATE, KEY, QUERY, UP, VALUE, concatenate
from mcore_ckpt_ext.families.settings import Constant, Custom, Mapped, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_OURS = "decoder.layers.{layer}"
_THEIRS = "transformer.h.{layer}"
_QKV = concatenate(QUERY, KEY, VALUE)
_HEAD = "kv_channels"
_WIDTH = "intermediate_size"
_LENGTH = "seq_length"
_MOST = "max_position_embeddings"


def _width() -> Setting:
    """Return the setting of the total width of gate and up projection."""
    return Custom(
        (_WIDTH,),
        lambda arguments: {_WIDTH: 2 * arguments.ffn_hidden_size},
        lambda config: {"ffn_hidden_size": checked_size(_WIDTH, config[_WIDTH], 1 << 40) // 2},
    )


def _heads() -> Setting:
    def to_arguments(config: Config) -> dict[str, Any]:
        width = config.get(_HEAD, 128)
        heads = config["num_attention_heads"]
        hidden = config["hidden_size"]
        if width * heads != hidden:
            raise contradictory(_HEAD, width, f"{hidden} of hidden_size for {quantity(heads, 'head')}")
        return {"kv_channels": width, "group_query_attention": False, "num_query_groups": heads}

    return Custom((_HEAD,), lambda arguments: {_HEAD: arguments.kv_channels}, to_arguments)


def _length() -> Setting:
    """Return the setting of the length up to which frequencies and queries are not scaled."""
    return Custom(
        (_LENGTH, _MOST),
        lambda arguments: {_LENGTH: arguments.require(_MOST), _MOST: arguments.require(_MOST)},
        lambda config: {_MOST: checked_size(_LENGTH, config.get(_LENGTH, config.get(_MOST, 8192)), 1 << 40)},
    )


class Qwen(Family):
    """Llama with other names, and queries, keys and values with biases in one matrix.

    Its folders contain their own code (`modeling_qwen.py`): `w2` is the gate, and `use_dynamic_ntk` and `use_logn_attn`
    have an effect on texts longer than `seq_length`.
    """

    model_type = "qwen"
    architecture = "QWenLMHeadModel"
    contained_in = "Qwen2"
    rules = (
        Rule("transformer.wte.weight", "embedding.word_embeddings.weight"),
        Rule(f"{_THEIRS}.ln_1.weight", f"{_OURS}.self_attention.linear_qkv.layer_norm_weight"),
        Rule(f"{_THEIRS}.attn.c_attn.weight", f"{_OURS}.self_attention.linear_qkv.weight", _QKV),
        Rule(f"{_THEIRS}.attn.c_attn.bias", f"{_OURS}.self_attention.linear_qkv.bias", _QKV),
        Rule(f"{_THEIRS}.attn.c_proj.weight", f"{_OURS}.self_attention.linear_proj.weight"),
        Rule(f"{_THEIRS}.ln_2.weight", f"{_OURS}.mlp.linear_fc1.layer_norm_weight"),
        Rule(f"{_THEIRS}.mlp.w1.weight", f"{_OURS}.mlp.linear_fc1.weight", UP),
        Rule(f"{_THEIRS}.mlp.w2.weight", f"{_OURS}.mlp.linear_fc1.weight", GATE),
        Rule(f"{_THEIRS}.mlp.c_proj.weight", f"{_OURS}.mlp.linear_fc2.weight"),
        Rule("transformer.ln_f.weight", "decoder.final_layernorm.weight"),
        Rule("lm_head.weight", "output_layer.weight"),
    )
    # Keys about kernels, precision, and texts longer than `seq_length`.
    without_effect = (
        "bf16",
        "fp16",
        "fp32",
        "use_flash_attn",
        "use_cache_quantization",
        "use_cache_kernel",
        "softmax_in_fp32",
        "use_dynamic_ntk",
        "use_logn_attn",
        "emb_dropout_prob",
    )
    settings = (
        Size("num_hidden_layers", "num_layers", 32, counted=True),
        Size("hidden_size", "hidden_size", 4096),
        Size("num_attention_heads", "num_attention_heads", 32, counted=True),
        Size("vocab_size", "vocab_size", 151936),
        _width(),
        _heads(),
        IMPLIED_HEAD_SIZE,
        NO_QUERY_GROUPS,
        _length(),
        RMS_NORM,
        Mapped("layer_norm_epsilon", "layernorm_epsilon", 1e-6),
        Mapped("initializer_range", "init_method_std", 0.02),
        Mapped("attn_dropout_prob", "attention_dropout", 0.0),
        Mapped("rotary_emb_base", "rotary_base", 10000),
        Constant("rotary_pct", 1.0, {"position_embedding_type": "rope", "rotary_percent": 1.0}),
        Constant("scale_attn_weights", True, {}),
        Constant("no_bias", True, {"add_bias_linear": False, "add_qkv_bias": True}),
        Constant("tie_word_embeddings", False, {"untie_embeddings_and_output_weights": True}),
        Requires({"swiglu": True, "rotary_interleaved": False}),
    )

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        return [
            exact_up_to(arguments, "may change the base of RoPE (use_dynamic_ntk) and scale queries (use_logn_attn)")
        ]
