"""DeepSeek-V2 and V2-Lite."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.config_keys import is_accepted
from mcore_ckpt_ext.families.deepseek import (
    RULES,
    dense_first,
    expert_sizes,
    inner_norm_settings,
    latent_settings,
    ranking_depth,
    scaled_gates,
)
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Coefficient, Constant, Custom, Setting
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_GROUPED = ("moe_router_num_groups", "moe_router_group_topk")
_ACCEPT = "--accept-key topk_method"
_METHOD = "topk_method"
_GREEDY = "greedy"
_LIMITED = "group_limited_greedy"


def _limited_groups() -> Setting:
    """Return the setting of the number of expert groups per token.

    transformers (`DeepseekV2TopkRouter`, 5.23), vLLM and the released code rank a group by its best expert. Megatron
    ranks it by the sum of its best experts (`group_limited_topk`, moe_utils.py, core_v0.12 to 0.19.2). So Megatron
    chooses other experts, unless the sum is over a single one.
    """

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        groups = arguments.moe_router_num_groups
        chosen = arguments.moe_router_group_topk
        return {_METHOD: _LIMITED if groups else _GREEDY, "n_group": groups or 1, "topk_group": chosen or 1}

    def to_arguments(config: Config) -> dict[str, Any]:
        method = config.get(_METHOD, _GREEDY)
        if method not in (_GREEDY, _LIMITED):
            raise unrepresentable(_METHOD, method, f"{_GREEDY} or {_LIMITED}")
        if method == _GREEDY:
            return dict.fromkeys(_GROUPED)
        groups = config["n_group"]
        chosen = config["topk_group"]
        best = config["num_experts_per_tok"] // chosen
        if groups > chosen and best != 1 and not is_accepted(_METHOD):
            raise UnsupportedCheckpointError(
                f"Megatron would choose other experts: {_METHOD} {_LIMITED}",
                found=f"transformers ranks a group of experts by its best one, Megatron by the sum of its best {best} "
                "(num_experts_per_tok over topk_group)",
                expected=f"{_GREEDY}, or as many groups as experts for each token",
                where="config.json",
                hint=f"if the job may choose other experts: {_ACCEPT}",
            )
        return dict(zip(_GROUPED, (groups, chosen), strict=True))

    def why_not(arguments: ModelArguments) -> list[str]:
        if ranking_depth(arguments) in (None, 1) or is_accepted(_METHOD):
            return []
        return [
            f"moe_router_group_topk is {arguments.moe_router_group_topk}: Megatron ranks a group of experts by its "
            f"best {ranking_depth(arguments)}, DeepSeek-V2 by its best one ({_ACCEPT} accepts that)"
        ]

    return Custom((_METHOD, "n_group", "topk_group"), to_config, to_arguments, why_not, expressed=_GROUPED)


class DeepSeekV2(Family):
    """Experts are chosen after softmax, and their weights are not normalized."""

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    rules = RULES
    read_rules = parts.STACKED_EXPERTS
    settings = (
        *latent_settings(),
        *expert_sizes(),
        dense_first(0),
        _limited_groups(),
        scaled_gates(1.0),
        Coefficient("aux_loss_alpha", "moe_aux_loss_coeff", 0.001),
        Constant("norm_topk_prob", False, {"moe_router_pre_softmax": True}),
        Constant("mlp_bias", False, {}),
        Constant("scoring_func", "softmax", {"moe_router_score_function": "softmax"}),
    )

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        if ranking_depth(arguments) in (None, 1):
            return inner_norm_settings(arguments)
        return [
            *inner_norm_settings(arguments),
            "groups of experts: transformers ranks a group by its best expert, Megatron by the sum of its best "
            f"{ranking_depth(arguments)}, so they may choose other experts, as you accepted",
        ]
