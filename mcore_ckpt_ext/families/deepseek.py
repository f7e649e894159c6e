"""Parts of DeepSeek-V2 and V3: latent attention, shared and routed experts, dense first layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import NO_BIASES, RMS_NORM, SILU, SIZES, TRAINING, tied_embeddings
from mcore_ckpt_ext.families.config_checks import Config, checked_size, mismatches, unrepresentable
from mcore_ckpt_ext.families.family import Rule, set_in
from mcore_ckpt_ext.families.rope import KEYS, base_of, concentration, mscales, rope_parameters, yarn_lengths
from mcore_ckpt_ext.families.settings import Coefficient, Constant, Custom, Mapped, Nullable, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments, has_experts

_OURS = "decoder.layers.{layer}.self_attention"
_THEIRS = "model.layers.{layer}.self_attn"
# YaRN: Megatron's arguments by Hugging Face's keys.
_YARN = {
    "factor": "rotary_scaling_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_max_position_embeddings",
}


_COMPRESSED = set_in("q_lora_rank")
LATENT_ATTENTION = (
    # Queries of V2-Lite are not compressed.
    Rule(
        f"{_THEIRS}.q_proj.weight",
        f"{_OURS}.linear_q_proj.weight",
        where=lambda arguments, layer: not _COMPRESSED(arguments, layer),
    ),
    Rule(f"{_THEIRS}.q_a_proj.weight", f"{_OURS}.linear_q_down_proj.weight", where=_COMPRESSED),
    Rule(f"{_THEIRS}.q_a_layernorm.weight", f"{_OURS}.linear_q_up_proj.layer_norm_weight", where=_COMPRESSED),
    Rule(f"{_THEIRS}.q_b_proj.weight", f"{_OURS}.linear_q_up_proj.weight", where=_COMPRESSED),
    Rule(f"{_THEIRS}.kv_a_proj_with_mqa.weight", f"{_OURS}.linear_kv_down_proj.weight"),
    Rule(f"{_THEIRS}.kv_a_layernorm.weight", f"{_OURS}.linear_kv_up_proj.layer_norm_weight"),
    Rule(f"{_THEIRS}.kv_b_proj.weight", f"{_OURS}.linear_kv_up_proj.weight"),
    parts.ATTENTION_OUTPUT,
)
RULES = (
    parts.EMBEDDING,
    *LATENT_ATTENTION,
    *parts.MLP,
    *parts.experts(),
    *parts.shared_experts("shared_experts"),
    parts.LATENT_ATTENTION_NORM,
    *parts.MLP_NORM,
    *parts.OUTPUT,
)


def _rope() -> Setting:
    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        scaling = None
        if arguments.rope_type != "rope":
            scaling = {"rope_type": "yarn", **{key: arguments.value(ours) for key, ours in _YARN.items()}}
            if not (scaling["mscale"] and scaling["mscale_all_dim"]):  # transformers uses both, or neither
                mscale = scaling.pop("mscale")
                all_dim = scaling["mscale_all_dim"]
                scaling["attention_factor"] = concentration(float(scaling["factor"]), mscale, all_dim)
        return {"rope_theta": float(arguments.rotary_base), "rope_scaling": scaling}

    def to_arguments(config: Config) -> dict[str, Any]:
        parameters = rope_parameters(config)
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise unrepresentable("partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
        arguments: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": base_of(parameters)}
        if parameters["rope_type"] == "default":
            return arguments | {"rope_type": "rope"}
        if parameters["rope_type"] != "yarn" or not parameters.get("truncate", True):
            raise unrepresentable("rope_scaling", parameters, "default, or yarn that truncates")
        factor, original = yarn_lengths(parameters, config)
        mscale, all_dim = mscales(parameters, factor, latent=True)
        return arguments | {
            "rope_type": "yarn",
            "rotary_scaling_factor": factor,
            "original_max_position_embeddings": original,
            "mscale": mscale,
            "mscale_all_dim": all_dim,
            "beta_fast": parameters.get("beta_fast") or 32,
            "beta_slow": parameters.get("beta_slow") or 1,
        }

    def why_not(arguments: ModelArguments) -> list[str]:
        # Megatron's latent attention uses `rope_type` for any kind of positions; `rope` is not scaled.
        return mismatches({"rotary_percent": 1.0}, arguments) if arguments.rope_type == "rope" else []

    return Custom(
        KEYS,
        to_config,
        to_arguments,
        why_not,
        expressed=(*_YARN.values(), "rope_type", "rotary_base", "rotary_percent", "position_embedding_type"),
    )


def scaled_gates(missing: float, key: str = "routed_scaling_factor") -> Setting:
    """Return the setting of the factor on the chosen experts' weights; `missing` is the default.

    Megatron takes 0 for no factor (`topk_routing_with_score_function`, moe_utils.py, core_v0.12 to 0.19.2).
    """
    name = "moe_router_topk_scaling_factor"

    def to_arguments(config: Config) -> dict[str, Any]:
        if (factor := config.get(key, missing)) == 0:
            raise unrepresentable(key, factor, "a number other than 0")
        return {name: factor}

    return Custom((key,), lambda arguments: {key: float(arguments.value(name) or 1.0)}, to_arguments, expressed=(name,))


DENSE = "dense"
SPARSE = "sparse"
COUNT_OF_DENSE = "first_k_dense_replace"
KINDS_OF_LAYERS = "mlp_layer_types"


def _experts_by_layer(arguments: ModelArguments) -> list[bool]:
    return [has_experts(arguments, layer) for layer in range(arguments.num_layers)]


def _why_not_dense_first(arguments: ModelArguments) -> list[str]:
    pattern = _experts_by_layer(arguments)
    return [] if any(pattern) and pattern == sorted(pattern) else ["no experts from some layer on"]


def dense_then_experts(pattern_of: Callable[[Config], list[int]]) -> Setting:
    """Return the setting of layers with experts after dense layers, which transformers 5 also lists.

    Args:
        pattern_of: returns 1 for each layer with experts and 0 for each dense one, given a `config.json`.
    """

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        pattern = _experts_by_layer(arguments)
        return {
            KINDS_OF_LAYERS: [SPARSE if is_sparse else DENSE for is_sparse in pattern],
            COUNT_OF_DENSE: pattern.index(True),
        }

    def to_arguments(config: Config) -> dict[str, Any]:
        pattern = pattern_of(config)
        return {"moe_layer_freq": 1 if all(pattern) else pattern}

    keys = (KINDS_OF_LAYERS, COUNT_OF_DENSE)
    return Custom(keys, to_config, to_arguments, _why_not_dense_first, expressed=("moe_layer_freq",))


def listed_dense_first(absent: int, *, counts: bool = True) -> Setting:
    """Return `dense_then_experts` for configurations whose list, if present, must agree with the count.

    Args:
        absent: number of dense layers if the count is missing.
        counts: the class derives a missing list from the count; if false, it always derives it from `absent`.
    """

    def pattern_of(config: Config) -> list[int]:
        layers = config["num_hidden_layers"]
        first = config.get(COUNT_OF_DENSE, absent)
        pattern = [int(layer >= first) for layer in range(layers)]
        listed = [SPARSE if is_sparse else DENSE for is_sparse in pattern]
        kinds = config.get(KINDS_OF_LAYERS) or (listed if counts else [DENSE] * absent + [SPARSE] * (layers - absent))
        if kinds != listed:
            raise unrepresentable(KINDS_OF_LAYERS, kinds, f"as {COUNT_OF_DENSE} says: {first} {DENSE}, then {SPARSE}")
        return pattern

    return dense_then_experts(pattern_of)


def dense_first(absent: int) -> Setting:
    """Return the setting of dense layers before those with experts; `absent` is the default number."""

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        pattern = _experts_by_layer(arguments)
        return {COUNT_OF_DENSE: pattern.index(True) if any(pattern) else len(pattern), "moe_layer_freq": 1}

    def to_arguments(config: Config) -> dict[str, Any]:
        first = config.get(COUNT_OF_DENSE, absent)
        step = config.get("moe_layer_freq", 1)
        layers = range(config["num_hidden_layers"])
        pattern = [int(layer >= first and layer % step == 0) for layer in layers]
        return {"moe_layer_freq": 1 if all(pattern) else pattern}

    keys = (COUNT_OF_DENSE, "moe_layer_freq")
    return Custom(keys, to_config, to_arguments, _why_not_dense_first, expressed=("moe_layer_freq",))


def shared_experts(key: str = "n_shared_experts", absent: int | None = None) -> Setting:
    """Return the setting of shared experts, which are one expert in Megatron.

    `absent` is their default number.
    """

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        size = arguments.require("moe_shared_expert_intermediate_size")
        return {key: size // arguments.moe_ffn_hidden_size}

    def to_arguments(config: Config) -> dict[str, Any]:
        count = checked_size(key, config[key] if absent is None else config.get(key, absent))
        return {"moe_shared_expert_intermediate_size": count * config["moe_intermediate_size"]}

    def why_not(arguments: ModelArguments) -> list[str]:
        size = arguments.moe_shared_expert_intermediate_size
        return [] if size and size % arguments.moe_ffn_hidden_size == 0 else ["no whole number of shared experts"]

    expressed = ("moe_shared_expert_intermediate_size",)
    return Custom((key,), to_config, to_arguments, why_not, expressed)


def grouped_choice(groups: int, chosen: int) -> Setting:
    """Return the setting of expert groups and of groups chosen per token; both with the class's defaults."""

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        return {"n_group": arguments.moe_router_num_groups or 1, "topk_group": arguments.moe_router_group_topk or 1}

    def to_arguments(config: Config) -> dict[str, Any]:
        of_groups = config.get("n_group", groups)
        of_chosen = config.get("topk_group", chosen)
        if of_chosen is not None:
            checked_size("topk_group", of_chosen)
        several = (of_groups or 1) > 1
        return {
            "moe_router_num_groups": of_groups if several else None,
            "moe_router_group_topk": of_chosen if several else None,
        }

    expressed = ("moe_router_num_groups", "moe_router_group_topk")
    return Custom(("n_group", "topk_group"), to_config, to_arguments, _why_not_best_two, expressed)


def ranking_depth(arguments: ModelArguments) -> int | None:
    """Return the number of best experts by which Megatron ranks a group.

    Source: `group_limited_topk` (moe_utils.py).

    Returns:
        None if groups do not limit the choice.
    """
    groups = arguments.moe_router_num_groups or 1
    chosen = arguments.moe_router_group_topk or 1
    return arguments.moe_router_topk // chosen if groups > chosen else None


def _why_not_best_two(arguments: ModelArguments) -> list[str]:
    """Return a reason if transformers, ranking a group by its best two experts, chooses other experts."""
    best = ranking_depth(arguments)
    groups = arguments.moe_router_num_groups
    if best not in (None, 2):
        experts = quantity(arguments.moe_router_topk or 0, "expert")
        chosen = f"{experts} of {quantity(arguments.moe_router_group_topk or 0, 'group')}"
        return [f"moe_router_topk and moe_router_group_topk are {chosen}: Megatron ranks a group by its best {best}"]
    single = groups and groups > 1 and (arguments.num_experts or 0) < 2 * groups
    return [f"moe_router_num_groups is {groups}, of one expert each"] if single else []


def normalized_sigmoids(chosen: int, key: str = "norm_topk_prob", *, absent: bool = True) -> Setting:
    """Return the setting of normalized weights; Megatron normalizes those of several experts only.

    `chosen` is the default of `num_experts_per_tok`, `absent` that of `key`.
    """

    def to_arguments(config: Config) -> dict[str, Any]:
        is_normalized = config.get(key, absent)
        several = config.get("num_experts_per_tok", chosen) > 1
        if is_normalized != several:
            raise unrepresentable(key, is_normalized, f"{several}: Megatron normalizes the weights of several experts")
        return {}

    return Custom((key,), lambda arguments: {key: arguments.moe_router_topk > 1}, to_arguments)


def sigmoid_routing(groups: int, chosen_groups: int, scaling: float) -> tuple[Setting, ...]:
    """Return the settings of routing by sigmoid and a trained bias, with the class's defaults."""
    return (
        grouped_choice(groups, chosen_groups),
        normalized_sigmoids(8),
        scaled_gates(scaling),
        Constant("scoring_func", "sigmoid", {"moe_router_score_function": "sigmoid"}),
        Constant("topk_method", "noaux_tc", {"moe_router_enable_expert_bias": True}),
        Coefficient("aux_loss_alpha", "moe_aux_loss_coeff", 0.001),
    )


_INNER_EPSILON = 1e-6


def inner_norm_settings(arguments: ModelArguments) -> list[str]:
    """Return a notice if norms of compressed queries, keys and values differ in epsilon.

    Source: transformers 4.36 to 5.23.
    """
    if not arguments.multi_latent_attention or arguments.layernorm_epsilon == _INNER_EPSILON:
        return []
    return [
        f"transformers norms compressed queries, keys and values with an epsilon of {_INNER_EPSILON}, whatever "
        f"rms_norm_eps says; Megatron and vLLM with that, {arguments.layernorm_epsilon}: logits differ a little"
    ]


def expert_sizes(routed: int | None = None, chosen: int | None = None, width: int | None = None) -> tuple[Setting, ...]:
    """Return the settings of the number and width of experts, with the class's defaults if it has any."""
    return (
        Size("n_routed_experts", "num_experts", routed, counted=True),
        shared_experts(),
        Size("num_experts_per_tok", "moe_router_topk", chosen),
        Size("moe_intermediate_size", "moe_ffn_hidden_size", width),
    )


def latent_settings(
    *, queries: int = 1536, keys: int = 128, values: int = 128, epsilon: float = 1e-6
) -> tuple[Setting, ...]:
    """Return the settings of latent attention, with the class's defaults.

    Args:
        queries: rank of compressed queries.
        keys: size of the part of a key that is not rotated.
        values: size of a value.
        epsilon: epsilon of norms.
    """
    return (
        *SIZES,
        tied_embeddings(by_default=False),
        *TRAINING,
        SILU,
        RMS_NORM,
        _rope(),
        Mapped("rms_norm_eps", "layernorm_epsilon", epsilon),
        Custom(
            ("num_key_value_heads",),
            lambda arguments: {"num_key_value_heads": arguments.num_attention_heads},
            lambda config: {},
        ),
        # Megatron's own head size, which latent attention does not use.
        Custom(("head_dim", "qk_head_dim"), lambda arguments: {}, lambda config: {}),
        Nullable("q_lora_rank", "q_lora_rank", queries),
        Size("kv_lora_rank", "kv_lora_rank", 512),
        Size("qk_nope_head_dim", "qk_head_dim", keys),
        Size("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
        Size("v_head_dim", "v_head_dim", values),
        Constant("attention_bias", False, NO_BIASES),
        Requires({"multi_latent_attention": True, "qk_layernorm": True}),
    )
