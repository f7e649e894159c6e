"""GPT-NeoX whose MLP follows attention: RedPajama-INCITE."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families.attention_settings import IMPLIED_HEAD_SIZE, NO_QUERY_GROUPS
from mcore_ckpt_ext.families.common_settings import SIZES, TRAINING, gelu, tied_embeddings
from mcore_ckpt_ext.families.config_checks import Config, contradictory, unrepresentable
from mcore_ckpt_ext.families.family import Family, Rule, untied
from mcore_ckpt_ext.families.rope import KEYS, Rope
from mcore_ckpt_ext.families.settings import Constant, Custom, Mapped, Requires, Setting
from mcore_ckpt_ext.families.unsupported import PARALLEL_BLOCKS
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_OURS = "decoder.layers.{layer}"
_THEIRS = "gpt_neox.layers.{layer}"
_PARALLEL = "use_parallel_residual"
_OLDER = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
_ABSENT = {"rotary_emb_base": 10000, "rotary_pct": 0.25}


def _rules(leaf: str) -> tuple[Rule, ...]:
    names = {
        "input_layernorm": "self_attention.linear_qkv.layer_norm_{leaf}",
        "attention.query_key_value": "self_attention.linear_qkv.{leaf}",
        "attention.dense": "self_attention.linear_proj.{leaf}",
        "post_attention_layernorm": "mlp.linear_fc1.layer_norm_{leaf}",
        "mlp.dense_h_to_4h": "mlp.linear_fc1.{leaf}",
        "mlp.dense_4h_to_h": "mlp.linear_fc2.{leaf}",
    }
    return (
        *(
            Rule(f"{_THEIRS}.{theirs}.{leaf}", f"{_OURS}.{ours.replace('{leaf}', leaf)}")
            for theirs, ours in names.items()
        ),
        Rule(f"gpt_neox.final_layer_norm.{leaf}", f"decoder.final_layernorm.{leaf}"),
    )


def _blocks() -> Setting:
    def to_arguments(config: Config) -> dict[str, Any]:
        if config.get(_PARALLEL, True):
            raise unrepresentable(_PARALLEL, f"{config.get(_PARALLEL, True)}: {PARALLEL_BLOCKS}", "False")
        return {}

    return Custom((_PARALLEL,), lambda arguments: {_PARALLEL: False}, to_arguments)


def _positions() -> Setting:
    """Return the setting of RoPE on a part of each head, with the class's names.

    It reads no other names outside `rope_parameters` (`convert_rope_params_to_dict`, 5.23; the constructor of 4.57).
    """
    usual = Rope(partial=0.25)

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        config = usual.config(arguments)
        return {"rope_scaling": config["rope_scaling"], **{older: config[newer] for older, newer in _OLDER.items()}}

    def to_arguments(config: Config) -> dict[str, Any]:
        for older, newer in _OLDER.items():
            if config.get(newer, meant := config.get(older, _ABSENT[older])) != meant:
                raise contradictory(older, meant, f"{config[newer]} as {newer}")
        older_keys = {newer: config[older] for older, newer in _OLDER.items() if older in config}
        return usual.arguments({**config, **older_keys})

    return Custom(
        (*KEYS, "partial_rotary_factor", *_OLDER), to_config, to_arguments, usual.mismatches, (*usual.expresses,)
    )


class GPTNeoX(Family):
    """Layer norms, biases everywhere, RoPE on a quarter of each head, GELU; untied embeddings.

    `query_key_value` has query, key and value head by head, as `linear_qkv` does
    (`GPTNeoXAttention.forward`, transformers 5.23).
    """

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    left_out = (r"\.rotary_emb\.inv_freq$", r"\.attention\.(bias|masked_bias)$")
    rules = (
        Rule("gpt_neox.embed_in.weight", "embedding.word_embeddings.weight"),
        *_rules("weight"),
        *_rules("bias"),
        Rule("embed_out.weight", "output_layer.weight", where=untied),
    )
    settings = (
        *SIZES,
        IMPLIED_HEAD_SIZE,
        _positions(),
        tied_embeddings(by_default=False),
        *TRAINING,
        _blocks(),
        Mapped("layer_norm_eps", "layernorm_epsilon", 1e-5),
        Mapped("hidden_dropout", "hidden_dropout", 0.0),
        gelu("hidden_act", exact=True),
        Constant("attention_bias", True, {"add_bias_linear": True, "add_qkv_bias": True}),
        Requires({"normalization": "LayerNorm", "layernorm_zero_centered_gamma": False}),
        NO_QUERY_GROUPS,
    )
