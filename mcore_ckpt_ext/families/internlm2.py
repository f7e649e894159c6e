"""InternLM2 and 2.5."""

from __future__ import annotations

from mcore_ckpt_ext.families.attention_settings import IMPLIED_HEAD_SIZE, query_groups
from mcore_ckpt_ext.families.common_settings import NO_BIASES, RMS_NORM, SILU, SIZES, TRAINING, tied_embeddings
from mcore_ckpt_ext.families.family import Family, Rule, untied
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.rows import GATE, UP
from mcore_ckpt_ext.families.settings import Constant, Mapped

_OURS = "decoder.layers.{layer}"
_THEIRS = "model.layers.{layer}"


class InternLM2(Family):
    """Llama with other names, and queries, keys and values in one matrix, group by group as in Megatron.

    Its folders contain their own code (`modeling_internlm2.py`): it splits `wqkv` into groups of queries, a key and a
    value, and does not scale RoPE of type `dynamic` up to `max_position_embeddings`.
    """

    model_type = "internlm2"
    architecture = "InternLM2ForCausalLM"
    contained_in = "Llama"
    rules = (
        Rule("model.tok_embeddings.weight", "embedding.word_embeddings.weight"),
        Rule(f"{_THEIRS}.attention.wqkv.weight", f"{_OURS}.self_attention.linear_qkv.weight"),
        Rule(f"{_THEIRS}.attention.wo.weight", f"{_OURS}.self_attention.linear_proj.weight"),
        Rule(f"{_THEIRS}.feed_forward.w1.weight", f"{_OURS}.mlp.linear_fc1.weight", GATE),
        Rule(f"{_THEIRS}.feed_forward.w3.weight", f"{_OURS}.mlp.linear_fc1.weight", UP),
        Rule(f"{_THEIRS}.feed_forward.w2.weight", f"{_OURS}.mlp.linear_fc2.weight"),
        Rule(f"{_THEIRS}.attention_norm.weight", f"{_OURS}.self_attention.linear_qkv.layer_norm_weight"),
        Rule(f"{_THEIRS}.ffn_norm.weight", f"{_OURS}.mlp.linear_fc1.layer_norm_weight"),
        Rule("model.norm.weight", "decoder.final_layernorm.weight"),
        Rule("output.weight", "output_layer.weight", where=untied),
    )
    without_effect = ("attn_implementation",)
    settings = (
        *SIZES,
        query_groups(),
        IMPLIED_HEAD_SIZE,
        Rope(),
        tied_embeddings(by_default=False),
        *TRAINING,
        SILU,
        RMS_NORM,
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-6),
        Constant("bias", False, NO_BIASES),
    )
