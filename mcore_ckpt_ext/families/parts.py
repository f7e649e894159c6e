"""Rules and settings that many families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mcore_ckpt_ext.families.family import Condition, Rule, always, dense, set_in, untied, with_experts
from mcore_ckpt_ext.families.rows import GATE, KEY, QUERY, UP, VALUE
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_OURS = "decoder.layers.{layer}"
_THEIRS = "model.layers.{layer}"

EMBEDDING = Rule("model.embed_tokens.weight", "embedding.word_embeddings.weight")
OUTPUT = (
    Rule("model.norm.weight", "decoder.final_layernorm.weight"),
    Rule("lm_head.weight", "output_layer.weight", where=untied),
)


def attention(leaf: str = "weight", where: Condition = always) -> tuple[Rule, ...]:
    """Return the rules for weights or biases of queries, keys and values."""
    qkv = f"{_OURS}.self_attention.linear_qkv.{leaf}"
    return (
        Rule(f"{_THEIRS}.self_attn.q_proj.{leaf}", qkv, QUERY, where),
        Rule(f"{_THEIRS}.self_attn.k_proj.{leaf}", qkv, KEY, where),
        Rule(f"{_THEIRS}.self_attn.v_proj.{leaf}", qkv, VALUE, where),
    )


ATTENTION_OUTPUT = Rule(f"{_THEIRS}.self_attn.o_proj.weight", f"{_OURS}.self_attention.linear_proj.weight")


def query_key_norms(where: Condition = always) -> tuple[Rule, ...]:
    """Return the rules for norms of queries and keys per head."""
    return (
        Rule(f"{_THEIRS}.self_attn.q_norm.weight", f"{_OURS}.self_attention.q_layernorm.weight", where=where),
        Rule(f"{_THEIRS}.self_attn.k_norm.weight", f"{_OURS}.self_attention.k_layernorm.weight", where=where),
    )


QUERY_KEY_NORMS = query_key_norms()
ATTENTION_NORM = Rule(f"{_THEIRS}.input_layernorm.weight", f"{_OURS}.self_attention.linear_qkv.layer_norm_weight")
LATENT_ATTENTION_NORM = Rule(f"{_THEIRS}.input_layernorm.weight", f"{_OURS}.input_layernorm.weight")
MLP_NORM = (
    Rule(f"{_THEIRS}.post_attention_layernorm.weight", f"{_OURS}.mlp.linear_fc1.layer_norm_weight", where=dense),
    Rule(f"{_THEIRS}.post_attention_layernorm.weight", f"{_OURS}.pre_mlp_layernorm.weight", where=with_experts),
)


def layer_norms() -> tuple[Rule, ...]:
    """Return the rules for layer norms of dense layers, and for the final one: weights and biases."""
    return tuple(
        rule
        for leaf in ("weight", "bias")
        for rule in (
            Rule(f"{_THEIRS}.input_layernorm.{leaf}", f"{_OURS}.self_attention.linear_qkv.layer_norm_{leaf}"),
            Rule(f"{_THEIRS}.post_attention_layernorm.{leaf}", f"{_OURS}.mlp.linear_fc1.layer_norm_{leaf}"),
            Rule(f"model.norm.{leaf}", f"decoder.final_layernorm.{leaf}"),
        )
    )


MLP = (
    Rule(f"{_THEIRS}.mlp.gate_proj.weight", f"{_OURS}.mlp.linear_fc1.weight", GATE, dense),
    Rule(f"{_THEIRS}.mlp.up_proj.weight", f"{_OURS}.mlp.linear_fc1.weight", UP, dense),
    Rule(f"{_THEIRS}.mlp.down_proj.weight", f"{_OURS}.mlp.linear_fc2.weight", where=dense),
)
MLP_WITHOUT_GATE = (Rule(f"{_THEIRS}.mlp.up_proj.weight", f"{_OURS}.mlp.linear_fc1.weight"), MLP[-1])
GATE_AND_UP = Rule(f"{_THEIRS}.mlp.gate_up_proj.weight", f"{_OURS}.mlp.linear_fc1.weight")
"""Gate and up projection in one matrix."""
DECODER = (
    EMBEDDING,
    *attention(),
    ATTENTION_OUTPUT,
    *MLP,
    ATTENTION_NORM,
    *MLP_NORM,
    *OUTPUT,
)
"""Rules of a decoder like Llama's, without experts."""


def _biases(mlp: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules of the biases of attention and of an MLP, given the rules of its weights."""
    weights = (ATTENTION_OUTPUT, *mlp)
    biases = (
        replace(
            rule,
            hugging_face=f"{rule.hugging_face.removesuffix('weight')}bias",
            megatron=f"{rule.megatron.removesuffix('weight')}bias",
            where=set_in("add_bias_linear"),
        )
        for rule in weights
    )
    return (*attention("bias", set_in("add_bias_linear")), *biases)


BIASES = _biases(MLP)
BIASES_WITHOUT_GATE = _biases(MLP_WITHOUT_GATE)
"""Rules of the biases of all matrices of a decoder without experts, for models that have them."""


def mtp_layers(rules: Sequence[Rule], final_norm: str = "shared_head.norm") -> tuple[Rule, ...]:
    """Return the rules of an MTP layer: two norms and a projection, a decoder layer, and a final norm.

    Megatron always stores the decoder layer as `transformer_layer` (`sharded_state_dict`,
    megatron/core/transformer/multi_token_prediction.py, core_v0.12 to 0.19.2).

    Args:
        rules: rules of the decoder's layers.
        final_norm: name of the final norm in Hugging Face.
    """
    ours = "mtp.layers.{step}"
    theirs = "model.layers.{next}"
    return (
        Rule(f"{theirs}.enorm.weight", f"{ours}.enorm.weight"),
        Rule(f"{theirs}.hnorm.weight", f"{ours}.hnorm.weight"),
        Rule(f"{theirs}.eh_proj.weight", f"{ours}.eh_proj.weight"),
        *inner_layer(rules, theirs),
        Rule(f"{theirs}.{final_norm}.weight", f"{ours}.final_layernorm.weight"),
    )


REPEATED_FOR_MTP = (
    Rule("model.layers.{next}.embed_tokens.weight", "embedding.word_embeddings.weight"),
    Rule("model.layers.{next}.shared_head.head.weight", "output_layer.weight", where=untied),
)
"""Embedding and output layer, which Megatron has once and published folders repeat in each MTP layer."""


def one_further_token(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules of an MTP layer for the Qwen families, which have at most one (`mtp.layers.0`).

    Args:
        rules: rules of a decoder layer like the last one.
    """
    ours = "mtp.layers.{step}"
    named = {
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "fc": "eh_proj",
        "norm": "final_layernorm",
    }
    return (
        *(
            Rule(f"mtp.{their_name}.weight", f"{ours}.{other}.weight", where=set_in("mtp_num_layers"))
            for their_name, other in named.items()
        ),
        *inner_layer(rules, ours),
    )


def inner_layer(rules: Sequence[Rule], theirs: str) -> tuple[Rule, ...]:
    """Return the rules of the decoder layer inside an MTP layer.

    Args:
        rules: rules of a decoder, of which those of its layers apply.
        theirs: the layer's name in Hugging Face.
    """
    return tuple(
        replace(
            rule,
            hugging_face=rule.hugging_face.replace(_THEIRS, theirs),
            megatron=rule.megatron.replace(_OURS, "mtp.layers.{step}.transformer_layer"),
        )
        for rule in rules
        if "{layer}" in rule.hugging_face
    )


def several_mtp_layers(arguments: ModelArguments) -> list[str]:
    """Return a reason if a model has more than one MTP layer."""
    return ["mtp_num_layers is more than 1"] if (arguments.mtp_num_layers or 0) > 1 else []


_EXPERT = f"{_OURS}.mlp.experts.experts.{{expert}}"


def experts(
    module: str = "mlp", router: str = "gate", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """Return the rules for the router and the experts, with Hugging Face's names."""
    theirs = f"{_THEIRS}.{module}"
    each = f"{theirs}.experts.{{expert}}"
    return (
        Rule(f"{theirs}.{router}.weight", f"{_OURS}.mlp.router.weight", where=with_experts),
        Rule(f"{each}.{gate}.weight", f"{_EXPERT}.linear_fc1.weight", GATE, with_experts),
        Rule(f"{each}.{up}.weight", f"{_EXPERT}.linear_fc1.weight", UP, with_experts),
        Rule(f"{each}.{down}.weight", f"{_EXPERT}.linear_fc2.weight", where=with_experts),
    )


# The form in models of transformers 5, which `save_pretrained(save_original_format=False)` writes.
STACKED_EXPERTS = (
    Rule(f"{_THEIRS}.mlp.experts.gate_up_proj", f"{_EXPERT}.linear_fc1.weight", where=with_experts),
    Rule(f"{_THEIRS}.mlp.experts.down_proj", f"{_EXPERT}.linear_fc2.weight", where=with_experts),
)


EXPERT_BIAS = Rule(
    f"{_THEIRS}.mlp.gate.e_score_correction_bias",
    f"{_OURS}.mlp.router.expert_bias",
    where=with_experts,
    keeps_dtype=True,
)


def shared_experts(module: str) -> tuple[Rule, ...]:
    """Return the rules for the shared expert, with Hugging Face's name."""
    ours = f"{_OURS}.mlp.shared_experts"
    theirs = f"{_THEIRS}.mlp.{module}"
    return (
        Rule(f"{theirs}.gate_proj.weight", f"{ours}.linear_fc1.weight", GATE, with_experts),
        Rule(f"{theirs}.up_proj.weight", f"{ours}.linear_fc1.weight", UP, with_experts),
        Rule(f"{theirs}.down_proj.weight", f"{ours}.linear_fc2.weight", where=with_experts),
    )
