"""Shared settings of the Qwen families with experts."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families.config_checks import Config, checked_size, contradictory
from mcore_ckpt_ext.families.family import Rule, with_experts
from mcore_ckpt_ext.families.settings import Coefficient, Custom, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments, has_experts

SHARED_EXPERT_GATE = Rule(
    "model.layers.{layer}.mlp.shared_expert_gate.weight",
    "decoder.layers.{layer}.mlp.shared_experts.gate_weight",
    where=with_experts,
)


def expert_layers() -> Setting:
    """Return the setting of layers with experts: each `decoder_sparse_step`-th, except `mlp_only_layers`."""

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        layers = range(arguments.num_layers)
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in layers if not has_experts(arguments, layer)],
        }

    def to_arguments(config: Config) -> dict[str, Any]:
        step = config.get("decoder_sparse_step", 1)
        plain = config.get("mlp_only_layers") or []
        layers = range(config["num_hidden_layers"])
        plain = {layer for layer in plain if type(layer) is int and layer in layers}
        pattern = [int((layer + 1) % step == 0 and layer not in plain) for layer in layers]
        return {"moe_layer_freq": 1 if all(pattern) else pattern}

    def why_not(arguments: ModelArguments) -> list[str]:
        return [] if arguments.num_experts else ["no experts"]

    return Custom(
        ("decoder_sparse_step", "mlp_only_layers"), to_config, to_arguments, why_not, expressed=("moe_layer_freq",)
    )


def expert_count(default: int) -> Setting:
    """Return the setting of the number of experts.

    For some classes transformers 5 writes `num_local_experts`.
    """
    return Custom(
        ("num_experts", "num_local_experts"),
        lambda arguments: {"num_experts": arguments.num_experts},
        lambda config: {"num_experts": checked_size("num_experts", _count(config, default))},
        expressed=("num_experts",),
    )


def _count(config: Config, default: int) -> Any:
    counts = [config[key] for key in ("num_experts", "num_local_experts") if config.get(key) is not None]
    if len({*counts}) > 1:
        raise contradictory("num_experts", counts[0], f"{counts[1]} as num_local_experts")
    return counts[0] if counts else default


def normalized_choice(by_default: bool = False) -> Setting:
    """Return the setting of normalized probabilities of the chosen experts (softmax after the choice)."""
    return Custom(
        ("norm_topk_prob",),
        lambda arguments: {"norm_topk_prob": not arguments.moe_router_pre_softmax},
        lambda config: {"moe_router_pre_softmax": not config.get("norm_topk_prob", by_default)},
        expressed=("moe_router_pre_softmax",),
    )


def expert_settings(count: int, chosen: int, width: int, *, normalized: bool = False) -> tuple[Setting, ...]:
    """Return all settings of experts; the numbers are the defaults of Hugging Face's class.

    Args:
        count: number of experts.
        chosen: number of experts per token.
        width: width of an expert.
        normalized: the probabilities of the chosen experts are normalized.
    """
    return (
        expert_count(count),
        expert_layers(),
        normalized_choice(normalized),
        Size("num_experts_per_tok", "moe_router_topk", chosen),
        Size("moe_intermediate_size", "moe_ffn_hidden_size", width),
        Coefficient("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
    )
