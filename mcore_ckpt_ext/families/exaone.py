"""EXAONE 3 and 3.5."""

from __future__ import annotations

from mcore_ckpt_ext.families.attention_settings import head_size, query_groups
from mcore_ckpt_ext.families.common_settings import INITIAL, NO_BIASES, RMS_NORM, tied_embeddings
from mcore_ckpt_ext.families.family import Family, Rule, untied
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.rows import GATE, KEY, QUERY, UP, VALUE
from mcore_ckpt_ext.families.settings import Constant, Mapped, Requires, Size

_OURS = "decoder.layers.{layer}"
_THEIRS = "transformer.h.{layer}"
_ATTENTION = f"{_THEIRS}.attn.attention"


class Exaone(Family):
    """Llama with other names; its folders contain their own code (`modeling_exaone.py`)."""

    model_type = "exaone"
    architecture = "ExaoneForCausalLM"
    contained_in = "Llama"
    rules = (
        Rule("transformer.wte.weight", "embedding.word_embeddings.weight"),
        Rule(f"{_THEIRS}.ln_1.weight", f"{_OURS}.self_attention.linear_qkv.layer_norm_weight"),
        Rule(f"{_ATTENTION}.k_proj.weight", f"{_OURS}.self_attention.linear_qkv.weight", KEY),
        Rule(f"{_ATTENTION}.v_proj.weight", f"{_OURS}.self_attention.linear_qkv.weight", VALUE),
        Rule(f"{_ATTENTION}.q_proj.weight", f"{_OURS}.self_attention.linear_qkv.weight", QUERY),
        Rule(f"{_ATTENTION}.out_proj.weight", f"{_OURS}.self_attention.linear_proj.weight"),
        Rule(f"{_THEIRS}.ln_2.weight", f"{_OURS}.mlp.linear_fc1.layer_norm_weight"),
        Rule(f"{_THEIRS}.mlp.c_fc_0.weight", f"{_OURS}.mlp.linear_fc1.weight", GATE),
        Rule(f"{_THEIRS}.mlp.c_fc_1.weight", f"{_OURS}.mlp.linear_fc1.weight", UP),
        Rule(f"{_THEIRS}.mlp.c_proj.weight", f"{_OURS}.mlp.linear_fc2.weight"),
        Rule("transformer.ln_f.weight", "decoder.final_layernorm.weight"),
        Rule("lm_head.weight", "output_layer.weight", where=untied),
    )
    left_out = (r"\.(rotary|rotary_emb)\.inv_freq$",)
    without_effect = ("embed_dropout",)  # also Megatron's `hidden_dropout`
    settings = (
        Size("num_layers", "num_layers", 32, counted=True),
        Size("hidden_size", "hidden_size", 2048),
        Size("num_attention_heads", "num_attention_heads", 32, counted=True),
        Size("intermediate_size", "ffn_hidden_size"),
        Size("max_position_embeddings", "max_position_embeddings", 2048),
        Size("vocab_size", "vocab_size", 102400),
        query_groups(),
        head_size(),
        Rope(),
        tied_embeddings(by_default=True),
        *INITIAL,
        Mapped("attention_dropout", "attention_dropout", 0.0),
        RMS_NORM,
        Mapped("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
        Constant("activation_function", "silu", {"swiglu": True}),
        Requires(NO_BIASES),
    )
