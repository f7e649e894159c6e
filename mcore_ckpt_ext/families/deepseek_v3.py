"""DeepSeek-V3, V3.1 and R1; Kimi-K2 (same architecture); Moonlight (uses the deepseek_v3 type)."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import ClassVar

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.deepseek import (
    RULES,
    dense_first,
    expert_sizes,
    inner_norm_settings,
    latent_settings,
    sigmoid_routing,
)
from mcore_ckpt_ext.families.family import Family, Rule
from mcore_ckpt_ext.families.settings import CheckedKeys, Constant, Custom, Setting
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_RULES = (*RULES, parts.EXPERT_BIAS)


def mtp_layers() -> Setting:
    """Return the setting of MTP layers; a folder may contain fewer layers than its configuration says."""
    key = "num_nextn_predict_layers"
    return Custom(
        (key, "num_mtp_layers"),
        lambda arguments: {key: arguments.mtp_num_layers or 0},
        lambda config: {"mtp_num_layers": config.get(key, config.get("num_mtp_layers", 1)) or None},
    )


def check_head_dim(config: Config) -> None:
    """Check `head_dim`, for which transformers computes rotation angles."""
    width = config.get("head_dim")
    rotated = config.get("qk_rope_head_dim", 64)
    if width not in (None, rotated):
        raise unrepresentable("head_dim", width, f"{rotated}, as qk_rope_head_dim")


class WithMtp(Family):
    """A family whose folders number the MTP layers after those of the decoder."""

    repeated: ClassVar[Sequence[Rule]] = parts.REPEATED_FOR_MTP
    megatron_left_out = (r"\.local_tokens_per_expert$",)

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        return inner_norm_settings(arguments)

    @override
    def mtp_layers(self, names: Collection[str], arguments: ModelArguments) -> int:
        following = range(arguments.num_layers, arguments.num_layers + (arguments.mtp_num_layers or 0))
        numbers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
        return len(numbers & {*following})

    @override
    def unmapped_tensors(self, names: Collection[str], arguments: ModelArguments, config: Config) -> set[str]:
        """Return unmapped tensors, including those of MTP layers that are not read."""
        configured = self.mapped_arguments(config).mtp_num_layers or 0
        following = range(arguments.num_layers + (arguments.mtp_num_layers or 0), arguments.num_layers + configured)
        return super().unmapped_tensors(names, arguments, config) | {
            name for name in names if (match := _LAYER.match(name)) and int(match[1]) in following
        }


class DeepSeekV3(WithMtp):
    """Experts are chosen by a sigmoid and a trained bias, and their weights are normalized."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    rules = (*_RULES, *parts.mtp_layers(_RULES))
    read_rules = parts.STACKED_EXPERTS
    settings = (
        *latent_settings(),
        *expert_sizes(256, 8, 2048),
        dense_first(3),
        *sigmoid_routing(8, 4, 2.5),
        mtp_layers(),
        CheckedKeys("head_dim", check=check_head_dim),
        Constant("rope_interleave", True, {}),
    )


class KimiK2(DeepSeekV3):
    """DeepSeek-V3's code, which Kimi-K2's folders contain by this name; transformers has no such class."""

    model_type = "kimi_k2"
    contained_in = "DeepSeek-V3"
