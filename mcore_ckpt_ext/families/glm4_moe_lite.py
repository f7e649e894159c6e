"""GLM-4.7-Flash."""

from __future__ import annotations

from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.deepseek import (
    COUNT_OF_DENSE,
    DENSE,
    KINDS_OF_LAYERS,
    SPARSE,
    dense_then_experts,
    expert_sizes,
    latent_settings,
    sigmoid_routing,
)
from mcore_ckpt_ext.families.deepseek_v3 import DeepSeekV3, check_head_dim, mtp_layers
from mcore_ckpt_ext.families.settings import CheckedKeys, Constant


def _pattern(config: Config) -> list[int]:
    """Return 1 for each layer with experts, 0 for each dense one.

    Without a list, only the first layer is dense.
    """
    layers = config["num_hidden_layers"]
    kinds = config.get(KINDS_OF_LAYERS) or [DENSE, *[SPARSE] * (layers - 1)]
    pattern = [int(kind == SPARSE) for kind in kinds]
    if len(kinds) != layers or not {*kinds} <= {DENSE, SPARSE} or pattern != sorted(pattern) or not pattern[-1]:
        raise unrepresentable(KINDS_OF_LAYERS, kinds, f"{DENSE} layers, then {SPARSE} ones")
    dense = layers - sum(pattern)
    if config.get(COUNT_OF_DENSE, dense) != dense:
        raise unrepresentable(COUNT_OF_DENSE, config[COUNT_OF_DENSE], f"{dense}, as {KINDS_OF_LAYERS} says")
    return pattern


_LAYERS = dense_then_experts(_pattern)


class Glm4MoELite(DeepSeekV3):
    """DeepSeek-V3's layers with another name and other defaults."""

    model_type = "glm4_moe_lite"
    contained_in = "DeepSeek-V3"
    architecture = "Glm4MoeLiteForCausalLM"
    settings = (
        *latent_settings(queries=768, keys=192, values=256, epsilon=1e-5),
        *expert_sizes(64, 4, 1536),
        _LAYERS,
        *sigmoid_routing(1, 1, 1.8),
        mtp_layers(),
        CheckedKeys("head_dim", check=check_head_dim),
        Constant("rope_interleave", True, {}),
        Constant("partial_rotary_factor", 1.0, {}),
    )
