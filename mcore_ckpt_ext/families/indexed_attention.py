"""DeepSeek-V3.2 and GLM-5 (latent attention to the tokens that an indexer selects)."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from mcore_ckpt_ext.errors import quantity, shorten
from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import check_kinds_of_attention
from mcore_ckpt_ext.families.config_checks import Config, contradictory, unrepresentable
from mcore_ckpt_ext.families.deepseek import (
    LATENT_ATTENTION,
    expert_sizes,
    latent_settings,
    listed_dense_first,
    sigmoid_routing,
)
from mcore_ckpt_ext.families.deepseek_v3 import WithMtp, mtp_layers
from mcore_ckpt_ext.families.family import Condition, Rule, always
from mcore_ckpt_ext.families.settings import CheckedKeys, Constant, Custom, Forbidden, Implies, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_OURS = "decoder.layers.{layer}.self_attention"
_THEIRS = "model.layers.{layer}.self_attn"
_INDEXER = f"{_OURS}.core_attention.indexer"
_NORMS = {
    f"{_OURS}.linear_q_up_proj.layer_norm_weight": f"{_OURS}.q_layernorm.weight",
    f"{_OURS}.linear_kv_up_proj.layer_norm_weight": f"{_OURS}.kv_layernorm.weight",
}
_INDEXED = "indexed_attention"

# The norms of compressed queries, keys and values are separate modules here (`get_dsa_module_spec_for_backend`).
_ATTENTION = tuple(
    Rule(rule.hugging_face, _NORMS.get(rule.megatron, rule.megatron), rule.rows, rule.where)
    for rule in LATENT_ATTENTION
    if not rule.hugging_face.endswith(".q_proj.weight")
)


def _rules(with_indexer: Condition = always) -> tuple[Rule, ...]:
    """Return the rules of a decoder layer, which may have its own indexer."""
    return (
        *_ATTENTION,
        *(
            Rule(f"{_THEIRS}.indexer.{name}.weight", f"{_INDEXER}.linear_{name}.weight", where=with_indexer)
            for name in ("wq_b", "wk", "weights_proj")
        ),
        *(
            Rule(f"{_THEIRS}.indexer.k_norm.{leaf}", f"{_INDEXER}.k_norm.{leaf}", where=with_indexer)
            for leaf in ("weight", "bias")
        ),
        *parts.MLP,
        *parts.experts(),
        *parts.shared_experts("shared_experts"),
        parts.LATENT_ATTENTION_NORM,
        *parts.MLP_NORM,
        parts.EXPERT_BIAS,
    )


def _computes_indices(arguments: ModelArguments, layer: int) -> bool:
    """Return whether a decoder layer has its own indexer, instead of reusing tokens of an earlier layer.

    Source: `is_dsa_skip_topk_layer`, experimental_attention_variant/dsa.py (core_v0.19.0 to 0.19.2), which counts
    layers from 1.
    """
    offset = max(arguments.dsa_indexer_skip_topk_offset, 1)
    return max(layer + 1 - offset, 0) % arguments.dsa_indexer_topk_freq == 0


_LAYERS = listed_dense_first(3)


def _check_layer_types(config: Config) -> None:
    """Check `layer_types`; transformers renames older names (`configuration_utils.py`, 5.23)."""
    check_kinds_of_attention(config, _INDEXED, "deepseek_sparse_attention")


_KINDS_OF_INDEXERS = "indexer_types"
_OLDER_KINDS = "index_topk_pattern"
_FREQUENCY = "index_topk_freq"
_OFFSET = "index_skip_topk_offset"
_FULL = "full"
_SHARED = "shared"


def _indexers_of(config: Config) -> list[str]:
    """Return the kind of each layer's indexer as in `GlmMoeDsaConfig.__post_init__` (transformers 5.23)."""
    layers = config["num_hidden_layers"]
    key = _KINDS_OF_INDEXERS if config.get(_KINDS_OF_INDEXERS) is not None else _OLDER_KINDS
    if (listed := config.get(key)) is not None:
        kinds = [{"F": _FULL, "S": _SHARED}.get(kind, kind) for kind in listed]
        if len(kinds) != layers or {*kinds} - {_FULL, _SHARED}:
            raise unrepresentable(
                key, shorten(repr(listed)), f"{_FULL} or {_SHARED}, for each of {quantity(layers, 'layer')}"
            )
        return kinds
    frequency = max(config.get(_FREQUENCY, 1), 1)
    offset = config.get(_OFFSET, 2)
    return [_FULL if max(layer - offset + 1, 0) % frequency == 0 else _SHARED for layer in range(layers)]


def _spacing(kinds: list[str]) -> tuple[int, int]:
    """Return Megatron's frequency and offset: full layers first, then one of every `frequency` layers."""
    if _SHARED not in kinds:
        return 1, 0
    offset = kinds.index(_SHARED)
    following = kinds[offset:]
    return (following.index(_FULL) if _FULL in following else len(following)) + 1, offset


def _shared_indexers() -> Setting:
    """Return the setting of layers that reuse the tokens of an earlier layer's indexer."""

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        frequency = arguments.dsa_indexer_topk_freq
        layers = range(arguments.num_layers)
        if frequency == 1:
            return {_FREQUENCY: 1}
        return {
            _FREQUENCY: frequency,
            _OFFSET: max(arguments.dsa_indexer_skip_topk_offset, 1),
            _KINDS_OF_INDEXERS: [_FULL if _computes_indices(arguments, layer) else _SHARED for layer in layers],
        }

    def to_arguments(config: Config) -> dict[str, Any]:
        kinds = _indexers_of(config)
        frequency, offset = _spacing(kinds)
        layers = range(1, len(kinds) + 1)
        if kinds != [_SHARED if max(layer - offset, 0) % frequency else _FULL for layer in layers]:
            raise unrepresentable(
                _KINDS_OF_INDEXERS,
                "".join(kind[0].upper() for kind in kinds),
                "full in the first layers, then in every n-th layer",
            )
        return {"dsa_indexer_topk_freq": frequency, "dsa_indexer_skip_topk_offset": offset}

    def why_not(arguments: ModelArguments) -> list[str]:
        # MTP layers are also numbered from 1, and the first `offset` have indexers.
        further = range(arguments.mtp_num_layers or 0)
        shares = not all(_computes_indices(arguments, layer) for layer in further)
        return ["an MTP layer without its own indexer"] if shares else []

    return Custom(
        (_KINDS_OF_INDEXERS, _OLDER_KINDS, _FREQUENCY, _OFFSET),
        to_config,
        to_arguments,
        why_not,
        expressed=("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"),
    )


def _indexer(heads: int, interleaved: bool) -> tuple[Setting, ...]:
    return (
        Size("index_topk", "dsa_indexer_topk", 2048),
        Size("index_head_dim", "dsa_indexer_head_dim", 128),
        Size("index_n_heads", "dsa_indexer_n_heads", heads, counted=True),
        Forbidden("mlp_bias"),
        CheckedKeys("layer_types", check=_check_layer_types),
        Constant("rope_interleave", True, {}),
        Constant("moe_layer_freq", 1, {}),
        Requires(
            {
                "experimental_attention_variant": "dsa",
                "dsa_indexer_rope_interleaved": interleaved,
                "dsa_indexer_k_norm_epsilon": 1e-6,
                "dsa_indexer_scoring_relu": True,
            }
        ),
        # A rotation for fp8 that does not change the products; transformers does not have it.
        Implies({"dsa_indexer_rotate_activation": False, "dsa_indexer_k_norm_fp32": False}),
    )


class DeepSeekV32(WithMtp):
    """DeepSeek-V3 with an indexer.

    Sources: transformers/models/deepseek_v32 and glm_moe_dsa (5.23); megatron/core/transformer/
    experimental_attention_variant/dsa.py (core_v0.19.2); glm_moe_dsa/glm5_bridge.py of Megatron-Bridge (067f987d).
    """

    needs_engine: ClassVar[bool] = True
    model_type = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"
    rules = (parts.EMBEDDING, *_rules(), *parts.OUTPUT, *parts.mtp_layers(_rules()))
    read_rules = parts.STACKED_EXPERTS
    settings = (
        *latent_settings(),
        *expert_sizes(256, 8, 2048),
        _LAYERS,
        *sigmoid_routing(8, 4, 2.5),
        mtp_layers(),
        *_indexer(64, interleaved=False),
        Requires({"dsa_indexer_topk_freq": 1}),
        Implies({"dsa_indexer_skip_topk_offset": 0}),
    )

    @override
    def shape(self, name: str, arguments: ModelArguments) -> tuple[int, ...]:
        heads = int(arguments.dsa_indexer_n_heads or 0)
        width = int(arguments.dsa_indexer_head_dim or 0)
        shapes = {
            "linear_wq_b.weight": (heads * width, int(arguments.q_lora_rank or 0)),
            "linear_wk.weight": (width, arguments.hidden_size),
            "k_norm.weight": (width,),
            "k_norm.bias": (width,),
            "linear_weights_proj.weight": (heads, arguments.hidden_size),
        }
        shape = shapes.get(name.rpartition(".core_attention.indexer.")[2])
        return super().shape(name, arguments) if shape is None else shape


def _check_experts(config: Config) -> None:
    """Check `num_experts`, which replaces `n_routed_experts` (`GlmMoeDsaConfig`, transformers 5.23)."""
    count = config.get("num_experts")
    if count is not None and count != config.get("n_routed_experts", 256):
        raise contradictory("num_experts", count, f"n_routed_experts {config.get('n_routed_experts', 256)}")


class GlmMoEDsa(DeepSeekV32):
    """DeepSeek-V3.2 with other defaults; its indexer uses interleaved RoPE, and layers may share it."""

    model_type = "glm_moe_dsa"
    architecture = "GlmMoeDsaForCausalLM"
    rules = (parts.EMBEDDING, *_rules(_computes_indices), *parts.OUTPUT, *parts.mtp_layers(_rules()))
    settings = (
        *latent_settings(queries=2048, keys=192, values=256, epsilon=1e-5),
        *expert_sizes(256, 8, 2048),
        _LAYERS,
        *sigmoid_routing(1, 1, 2.5),
        mtp_layers(),
        *_indexer(32, interleaved=True),
        CheckedKeys("num_experts", check=_check_experts),
        _shared_indexers(),
        Constant("indexer_rope_interleave", True, {}),
        Constant("partial_rotary_factor", 1.0, {}),
    )
