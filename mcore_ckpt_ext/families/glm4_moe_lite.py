"""GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families.arguments import ModelArguments, has_experts
from mcore_ckpt_ext.families.deepseek import expert_sizes, latent_settings, sigmoid_routing
from mcore_ckpt_ext.families.deepseek_v3 import DeepSeekV3, further_layers
from mcore_ckpt_ext.families.settings import Both, Config, Fixed, Setting, unrepresentable

_DENSE, _SPARSE = "dense", "sparse"


def _layers() -> Setting:
    """Which layers have experts: all but the first, or as a list says, beside which releases count the dense ones."""
    types, count = "mlp_layer_types", "first_k_dense_replace"

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        pattern = [has_experts(arguments, layer) for layer in range(arguments.num_layers)]
        return {types: [_SPARSE if one else _DENSE for one in pattern], count: pattern.index(True)}

    def to_arguments(config: Config) -> dict[str, Any]:
        layers = config["num_hidden_layers"]
        found = config.get(types) or [_DENSE, *[_SPARSE] * (layers - 1)]
        pattern = [int(kind == _SPARSE) for kind in found]
        if len(found) != layers or not {*found} <= {_DENSE, _SPARSE} or pattern != sorted(pattern) or not pattern[-1]:
            raise unrepresentable(types, found, f"{_DENSE} layers, then {_SPARSE} ones")
        if config.get(count, layers - sum(pattern)) != layers - sum(pattern):
            raise unrepresentable(count, config[count], f"{layers - sum(pattern)}, as {types} says")
        return {"moe_layer_freq": 1 if all(pattern) else pattern}

    def why_not(arguments: ModelArguments) -> list[str]:
        pattern = [has_experts(arguments, layer) for layer in range(arguments.num_layers)]
        return [] if any(pattern) and pattern == sorted(pattern) else ["no experts from some layer on"]

    return Both((types, count), to_config, to_arguments, why_not, expressed=("moe_layer_freq",))


class Glm4MoELite(DeepSeekV3):
    """DeepSeek-V3's layers under another name, with other defaults."""

    model_type = "glm4_moe_lite"
    architecture = "Glm4MoeLiteForCausalLM"
    settings = (
        *latent_settings(queries=768, keys=192, values=256, epsilon=1e-5), *expert_sizes(64, 4, 1536), _layers(),
        *sigmoid_routing(1, 1, 1.8), further_layers(), Fixed("rope_interleave", True, {}),
        Fixed("partial_rotary_factor", 1.0, {}),
    )  # fmt: skip

    def rather_another(self, arguments: ModelArguments) -> list[str]:
        """All that DeepSeek-V3 is."""
        return ["all that DeepSeek-V3 is"]
