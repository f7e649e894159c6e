"""GPT-BigCode: SantaCoder and StarCoder."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.families import gpt2
from mcore_ckpt_ext.families.config_checks import Config, contradictory
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.rows import WHOLE
from mcore_ckpt_ext.families.settings import Custom
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_ONE_GROUP = "multi_query"
_GROUPS = "num_key_value_heads"


def _to_config(arguments: ModelArguments) -> dict[str, Any]:
    return {_ONE_GROUP: arguments.num_query_groups == 1}


def _to_arguments(config: Config) -> dict[str, Any]:
    groups = 1 if config.get(_ONE_GROUP, True) else config["n_head"]
    if config.get(_GROUPS, groups) != groups:  # the class overwrites it
        raise contradictory(_GROUPS, config[_GROUPS], f"{groups} by {_ONE_GROUP}")
    return {"group_query_attention": groups != config["n_head"], "num_query_groups": groups}


def _why_not(arguments: ModelArguments) -> list[str]:
    possible = arguments.num_query_groups in (1, arguments.num_attention_heads)
    return [] if possible else ["query groups that are neither one nor one for each head"]


class GPTBigCode(Family):
    """GPT-2 whose heads share one key and one value, and whose matrices are not transposed.

    `c_attn` has all queries, the key and the value. If each head has its own key and value, it has them head by head
    (`GPTBigCodeAttention.forward`, transformers 5.23). Both agree with `linear_qkv`.
    """

    model_type = "gpt_bigcode"
    architecture = "GPTBigCodeForCausalLM"
    left_out = (r"\.attn\.(bias|masked_bias)$",)
    # The precision of attention.
    without_effect = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    rules = gpt2.rules(WHOLE)
    settings = (
        *gpt2.settings("gelu_pytorch_tanh"),
        Custom((_ONE_GROUP, _GROUPS), _to_config, _to_arguments, _why_not),
    )

    @override
    def prefer_other_family(self, arguments: ModelArguments) -> list[str]:
        return ["all that GPT-2 is"] if arguments.num_query_groups == arguments.num_attention_heads else []
