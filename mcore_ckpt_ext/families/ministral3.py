"""Ministral 3 and Devstral 2."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import sliding_window
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.config_checks import Config, mismatches, unrepresentable
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Custom, Requires, Setting
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_BETA = "llama_4_scaling_beta"
_NESTED = "rope_parameters"
_LENGTH = "max_position_embeddings"  # repeated among the keys of RoPE, where the class does not read it

# What the class has without `rope_parameters` (configuration_ministral3.py); where they lack a base, it is 10,000.
_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def _positions() -> Setting:
    """Return the setting of YaRN; its keys include a scaling of queries, which Megatron Core lacks.

    A query is multiplied by 1 + beta log(1 + floor(position / original_max_position_embeddings)), which is 1 for
    positions below that length (`get_llama_4_attn_scale` of transformers/models/ministral3, 5.23).
    """
    yarn = Rope(ignored=(_BETA, _LENGTH), scaling=_SCALING)

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        config = yarn.config(arguments)
        return {_NESTED: {**config["rope_scaling"], "rope_theta": config["rope_theta"], _BETA: 0.0}}

    def to_arguments(config: Config) -> dict[str, Any]:
        beta = (config.get(_NESTED) or {_BETA: 0.1}).get(_BETA)
        if isinstance(beta, bool) or not isinstance(beta, (int, float)):
            raise unrepresentable(_BETA, beta, "a number")
        return yarn.arguments(config)

    def why_not(arguments: ModelArguments) -> list[str]:
        return yarn.mismatches(arguments) + mismatches({"position_embedding_type": "yarn"}, arguments)

    return Custom(yarn.keys, to_config, to_arguments, why_not, (*yarn.expresses,))


class Ministral3(Family):
    """Mistral with YaRN; Ministral 3 also scales queries by their position."""

    model_type = "ministral3"
    architecture = "Ministral3ForCausalLM"
    contained_in = "Llama or Mistral"
    rules = parts.DECODER
    settings = (
        *llama_like(epsilon=1e-5, head_dim=True, head_dim_default=128, groups=8, positions=_positions()),
        sliding_window(None),
        Requires(NO_BIASES),
    )

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        length = arguments.value("yarn_original_max_position_embeddings")
        return [
            f"if {_BETA} is not 0 (Ministral 3), queries of tokens after the first {length} are multiplied by a factor "
            f"that Megatron does not have: train with --seq-length {length} or less"
        ]
