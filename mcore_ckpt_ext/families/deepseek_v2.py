"""DeepSeek-V2 and V2-Lite."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.deepseek import (
    RULES,
    dense_first,
    expert_sizes,
    inner_norm_settings,
    latent_settings,
    ranked_by,
    scaled_gates,
)
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Coefficient, Config, Constant, Custom, unrepresentable
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_GROUPED = ("moe_router_num_groups", "moe_router_group_topk")


def _groups(arguments: ModelArguments) -> dict[str, Any]:
    groups, chosen = arguments.moe_router_num_groups, arguments.moe_router_group_topk
    method = "group_limited_greedy" if groups else "greedy"
    return {"topk_method": method, "n_group": groups or 1, "topk_group": chosen or 1}


def _limits(config: Config) -> dict[str, Any]:
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise unrepresentable("topk_method", method, "greedy or group_limited_greedy")
    limited = method == "group_limited_greedy"
    return {
        "moe_router_num_groups": config["n_group"] if limited else None,
        "moe_router_group_topk": config["topk_group"] if limited else None,
    }


class DeepSeekV2(Family):
    """Experts are chosen after softmax, and their weights are not normalised among themselves."""

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    rules = RULES
    read_rules = parts.STACKED_EXPERTS
    settings = (
        *latent_settings(),
        *expert_sizes(),
        dense_first(0),
        Custom(("topk_method", "n_group", "topk_group"), _groups, _limits, expressed=_GROUPED),
        scaled_gates(1.0),
        Coefficient("aux_loss_alpha", "moe_aux_loss_coeff", 0.001),
        Constant("norm_topk_prob", False, {"moe_router_pre_softmax": True}),
        Constant("mlp_bias", False, {}),
        Constant("scoring_func", "softmax", {"moe_router_score_function": "softmax"}),
    )

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        if ranked_by(arguments) in (None, 1):
            return inner_norm_settings(arguments)
        return [
            *inner_norm_settings(arguments),
            "groups of experts: Hugging Face ranks a group by its best expert, Megatron by the sum of its best "
            "(group_limited_topk, moe_utils.py), so they may choose differently",
        ]
