"""DeepSeek-V3.2 and GLM-5, whose latent attention sees only tokens that an indexer chooses."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.arguments import ModelArguments
from mcore_ckpt_ext.families.deepseek import (
    COUNT_OF_DENSE,
    DENSE,
    KINDS_OF_LAYERS,
    LATENT_ATTENTION,
    SPARSE,
    dense_then_experts,
    expert_sizes,
    latent_settings,
    sigmoid_routing,
)
from mcore_ckpt_ext.families.deepseek_v3 import WithMtp, mtp_layers
from mcore_ckpt_ext.families.family import Rule
from mcore_ckpt_ext.families.settings import Both, Config, Fixed, Needs, Sets, Setting, Size, Without, unrepresentable

_OURS, _THEIRS = "decoder.layers.{layer}.self_attention", "model.layers.{layer}.self_attn"
_INDEXER = f"{_OURS}.core_attention.indexer"
_NORMS = {
    f"{_OURS}.linear_q_up_proj.layer_norm_weight": f"{_OURS}.q_layernorm.weight",
    f"{_OURS}.linear_kv_up_proj.layer_norm_weight": f"{_OURS}.kv_layernorm.weight",
}
_INDEXED = "indexed_attention"

# The norms of compressed queries, keys and values are modules of their own here (`get_dsa_module_spec_for_backend`).
_ATTENTION = tuple(
    Rule(rule.hugging_face, _NORMS.get(rule.megatron, rule.megatron), rule.rows, rule.where)
    for rule in LATENT_ATTENTION
    if not rule.hugging_face.endswith(".q_proj.weight")
)
_RULES = (
    *_ATTENTION,
    *(Rule(f"{_THEIRS}.indexer.{name}.weight", f"{_INDEXER}.linear_{name}.weight")
      for name in ("wq_b", "wk", "weights_proj")),
    *(Rule(f"{_THEIRS}.indexer.k_norm.{leaf}", f"{_INDEXER}.k_norm.{leaf}") for leaf in ("weight", "bias")),
    *parts.MLP, *parts.experts(), *parts.shared_experts("shared_experts"), parts.LATENT_ATTENTION_NORM,
    *parts.MLP_NORM, parts.EXPERT_BIAS,
)  # fmt: skip


def _pattern(config: Config) -> list[int]:
    """Counted, or listed as the count says."""
    layers, first = config["num_hidden_layers"], config.get(COUNT_OF_DENSE, 3)
    pattern = [int(layer >= first) for layer in range(layers)]
    listed = [SPARSE if one else DENSE for one in pattern]
    if (found := config.get(KINDS_OF_LAYERS, listed)) != listed:
        raise unrepresentable(KINDS_OF_LAYERS, found, f"as {COUNT_OF_DENSE} says: {first} {DENSE}, then {SPARSE}")
    return pattern


_LAYERS = dense_then_experts(_pattern)


def _every_layer(key: str, kind: str) -> Setting:
    """A list by layers that says the same of each; never written."""

    def to_arguments(config: Config) -> dict[str, Any]:
        if others := {*(config.get(key) or ())} - {kind}:
            raise unrepresentable(key, sorted(others)[0], f"{kind} in every layer")
        return {}

    return Both((key,), lambda arguments: {}, to_arguments)


def _pattern_of_indexers() -> Setting:
    """The older way to say `indexer_types`, which outweighs it; a letter for each layer, or a list. Never written."""
    older, newer = "index_topk_pattern", "indexer_types"

    def to_arguments(config: Config) -> dict[str, Any]:
        pattern = None if config.get(newer) is not None else config.get(older)
        if not isinstance(pattern or "", (str, list)) or {*(pattern or ())} - {"F", "full"}:
            raise unrepresentable(older, pattern, "F (full) in every layer")
        return {}

    return Both((older,), lambda arguments: {}, to_arguments)


def _indexer(heads: int, interleaved: bool) -> tuple[Setting, ...]:
    return (
        Size("index_topk", "dsa_indexer_topk", 2048), Size("index_head_dim", "dsa_indexer_head_dim", 128),
        Size("index_n_heads", "dsa_indexer_n_heads", heads, counted=True), Without("mlp_bias"),
        _every_layer("layer_types", _INDEXED), Fixed("rope_interleave", True, {}), Fixed("moe_layer_freq", 1, {}),
        Needs({
            "experimental_attention_variant": "dsa", "dsa_indexer_rope_interleaved": interleaved,
            "dsa_indexer_k_norm_epsilon": 1e-6, "dsa_indexer_topk_freq": 1, "dsa_indexer_scoring_relu": True,
        }),
        # A rotation that leaves products what they are, for the sake of fp8; transformers has none.
        Sets({"dsa_indexer_rotate_activation": False, "dsa_indexer_k_norm_fp32": False,
              "dsa_indexer_skip_topk_offset": 0}),
    )  # fmt: skip


class DeepSeekV32(WithMtp):
    """DeepSeek-V3 with an indexer.

    Sources: transformers/models/deepseek_v32 and glm_moe_dsa (5.23); megatron/core/transformer/
    experimental_attention_variant/dsa.py (core_v0.19.2); glm_moe_dsa/glm5_bridge.py of Megatron-Bridge (067f987d).
    """

    needs_engine: ClassVar[bool] = True
    model_type = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"
    rules = (parts.EMBEDDING, *_RULES, *parts.OUTPUT, *parts.mtp_layers(_RULES))
    also_read = parts.STACKED_EXPERTS
    settings = (
        *latent_settings(), *expert_sizes(256, 8, 2048), _LAYERS, *sigmoid_routing(8, 4, 2.5), mtp_layers(),
        *_indexer(64, interleaved=False),
    )  # fmt: skip

    @override
    def shape(self, name: str, arguments: ModelArguments) -> tuple[int, ...]:
        heads, width = int(arguments.dsa_indexer_n_heads or 0), int(arguments.dsa_indexer_head_dim or 0)
        shapes = {
            "linear_wq_b.weight": (heads * width, int(arguments.q_lora_rank or 0)),
            "linear_wk.weight": (width, arguments.hidden_size), "k_norm.weight": (width,), "k_norm.bias": (width,),
            "linear_weights_proj.weight": (heads, arguments.hidden_size),
        }  # fmt: skip
        found = shapes.get(name.rpartition(".core_attention.indexer.")[2])
        return super().shape(name, arguments) if found is None else found


class GlmMoEDsa(DeepSeekV32):
    """The same with other defaults, and an indexer that rotates neighbours together."""

    model_type = "glm_moe_dsa"
    architecture = "GlmMoeDsaForCausalLM"
    settings = (
        *latent_settings(queries=2048, keys=192, values=256, epsilon=1e-5), *expert_sizes(256, 8, 2048), _LAYERS,
        *sigmoid_routing(1, 1, 2.5), mtp_layers(), *_indexer(32, interleaved=True),
        _every_layer("indexer_types", "full"), Fixed("indexer_rope_interleave", True, {}),
        _pattern_of_indexers(), Fixed("index_topk_freq", 1, {}), Fixed("partial_rotary_factor", 1.0, {}),
    )  # fmt: skip
    without_effect = ("index_skip_topk_offset",)
