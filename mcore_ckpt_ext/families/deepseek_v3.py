"""DeepSeek-V3 and R1."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.arguments import ModelArguments
from mcore_ckpt_ext.families.deepseek import RULES, SETTINGS, dense_first, scaled_gates
from mcore_ckpt_ext.families.family import Family, Rule, with_experts
from mcore_ckpt_ext.families.settings import Both, Config, Fixed, Same, unrepresentable

_EXPERT_BIAS = Rule(
    "model.layers.{layer}.mlp.gate.e_score_correction_bias", "decoder.layers.{layer}.mlp.router.expert_bias",
    where=with_experts, keeps_dtype=True,
)  # fmt: skip

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def _groups(arguments: ModelArguments) -> dict[str, Any]:
    return {
        "n_group": arguments.moe_router_num_groups or 1,
        "topk_group": arguments.moe_router_group_topk or 1,
    }


def _limits(config: Config) -> dict[str, Any]:
    groups, chosen = config.get("n_group", 8) or 1, config.get("topk_group", 4)
    return {
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": chosen if groups > 1 else None,
    }


def _normalised(arguments: ModelArguments) -> dict[str, Any]:
    """Megatron divides the weights of the chosen experts by their sum, but not that of a single one."""
    return {"norm_topk_prob": arguments.moe_router_topk > 1}


def _check_normalised(config: Config) -> dict[str, Any]:
    normalised, several = config.get("norm_topk_prob", True), config.get("num_experts_per_tok", 8) > 1
    if normalised != several:
        raise unrepresentable("norm_topk_prob", normalised, f"{several}: Megatron normalises where experts are several")
    return {}


class DeepSeekV3(Family):
    """Experts are chosen by a sigmoid and a bias that training moves; their weights are normalised among themselves."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    rules = (*RULES, _EXPERT_BIAS)
    also_read = parts.STACKED_EXPERTS
    settings = (
        *SETTINGS,
        dense_first(3),
        Both(("n_group", "topk_group"), _groups, _limits,
             expressed=("moe_router_num_groups", "moe_router_group_topk")),
        scaled_gates(2.5),
        Same("aux_loss_alpha", "moe_aux_loss_coeff", 0.001),
        Both(("norm_topk_prob",), _normalised, _check_normalised),
        Fixed("scoring_func", "sigmoid", {"moe_router_score_function": "sigmoid"}),
        Fixed("topk_method", "noaux_tc", {"moe_router_enable_expert_bias": True}),
        Fixed("rope_interleave", True, {}),
        # Layers that predict further tokens: transformers has none, released folders have one.
        Both(
            ("num_nextn_predict_layers",),
            lambda arguments: {"num_nextn_predict_layers": 0},
            lambda config: {},
        ),
    )  # fmt: skip

    def without_place(self, names: Collection[str], arguments: ModelArguments, config: Config) -> set[str]:
        """Also the layers after the last one, which predict further tokens."""
        further = int(config.get("num_nextn_predict_layers", 1) or 0)
        following = range(arguments.num_layers, arguments.num_layers + further)
        return super().without_place(names, arguments, config) | {
            name for name in names if (match := _LAYER.match(name)) and int(match[1]) in following
        }
