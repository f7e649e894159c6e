"""DeepSeek-V3, V3.1 and R1; Kimi-K2, which is one under another name; Moonlight, which bears theirs."""

from __future__ import annotations

import re
from collections.abc import Collection

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.arguments import ModelArguments
from mcore_ckpt_ext.families.deepseek import RULES, SETTINGS, dense_first, expert_sizes, sigmoid_routing
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Both, Config, Fixed

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


class DeepSeekV3(Family):
    """Experts are chosen by a sigmoid and a bias that training moves; their weights are normalised among themselves."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    rules = (*RULES, parts.EXPERT_BIAS)
    also_read = parts.STACKED_EXPERTS
    settings = (
        *SETTINGS, *expert_sizes(256, 8, 2048), dense_first(3), *sigmoid_routing(8, 4, 2.5),
        Fixed("rope_interleave", True, {}),
        # Layers that predict further tokens: transformers has none, released folders have one.
        Both(
            ("num_nextn_predict_layers", "num_mtp_layers"),
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


class KimiK2(DeepSeekV3):
    """The code of DeepSeek-V3, which its folders bring along under this name; transformers has no such class."""

    model_type = "kimi_k2"

    @override
    def rather_another(self, arguments: ModelArguments) -> list[str]:
        return ["all that DeepSeek-V3 is"]
