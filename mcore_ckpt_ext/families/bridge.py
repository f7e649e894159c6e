"""Writes `run_config.yaml`, from which Megatron-Bridge reads the model of a checkpoint.

Source: `load_model_config` (training/model_load_save.py) and the providers below models/ of megatron-bridge 0.3.1. JSON
is valid YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.families.common_settings import experts_everywhere
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.job.arguments.conditions import WITH_DELTA_NET, WITH_PATTERN, WITH_SPARSE
from mcore_ckpt_ext.job.arguments.row import Argument, BridgeField
from mcore_ckpt_ext.job.arguments.table import BRIDGE_FIELDS, ROWS
from mcore_ckpt_ext.job.model_arguments import ModelArguments, is_gated

# The function that builds layers with variants of attention (qwen/qwen35_bridge.py, glm_moe_dsa/glm5_bridge.py,
# 0.6.0 and the development head of August 2026).
_LAYERS_OF_VARIANTS = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs."
    "get_transformer_block_with_experimental_attention_variant_spec"
)

# The function that builds each layer by what it contains: latent attention, experts in some layers
# (deepseek/deepseek_v3_bridge.py and glm/glm45_bridge.py). The default builds all alike, without latent attention.
_LAYERS_BY_CONTENT = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"

# Families whose rotated part of a head AutoBridge takes from `partial_rotary_factor` of the configuration's object
# (`CONFIG_MAPPING`, conversion/model_bridge.py of 0.6.2 and commit 067f987d). Since 5.0, transformers moves that key
# into `rope_parameters` (`convert_rope_params_to_dict`), also when it reads released folders.
_WITH_MOVED_FACTOR = ("bailing_moe", "bailing_moe_v2", "glm4_moe", "nemotron", "qwen3_next")

_SQUARED_RELU = "megatron.core.activations.squared_relu"
_EXACT_GELU = "torch.nn.functional.gelu"


def run_config(
    family: Family, arguments: ModelArguments, whole: Mapping[str, Any] | None = None, **sections: Any
) -> str:
    """Return the text of the file for an untrained model.

    Args:
        family: the family of the model.
        arguments: the arguments of the model.
        whole: fields of section `model` for a model with further parts.
        sections: other sections.
    """
    content = {
        "model": {**bridge_model(family, arguments), **(whole or {})},
        "checkpoint": {"save_rng": False, "save_optim": False, "fully_parallel_save": True},
        **sections,
    }
    # In YAML 1.1, which PyYAML reads, 1e-06 is a string and 1.0e-06 a number.
    return re.sub(r"(?<=: )(-?\d+)e(?=[+-]\d)", r"\1.0e", json.dumps(content, indent=2)) + "\n"


def bridge_model(family: Family, arguments: ModelArguments) -> dict[str, Any]:
    """Return the section `model`: class and fields, for a layout of one rank."""
    of_all = "mla_provider.MLAModelProvider" if arguments.multi_latent_attention else "gpt_provider.GPTModelProvider"
    model = {
        **model_fields(arguments),
        "_target_": f"megatron.bridge.models.{family.bridge_provider or of_all}",
        "_call_": True,
        **family.bridge_fields(arguments),
    }
    if family.bridge_provider and _activation(arguments) not in (_SQUARED_RELU, _EXACT_GELU):
        del model["activation_func"]  # the provider has the activation of the family
    return {name: value for name, value in model.items() if name not in family.bridge_lacks}


def import_notices(family: Family, arguments: ModelArguments) -> list[str]:
    """Return the notice for a model of which Bridge's AutoBridge builds another one."""
    if family.model_type not in _WITH_MOVED_FACTOR or arguments.rotary_percent == 1.0:
        return []
    return [
        "build the model from run_config.yaml, not by AutoBridge: with transformers 5, that of Megatron-Bridge 0.6.2 "
        f"rotates whole heads (rotary_percent 1.0), and this model a part of {arguments.rotary_percent}"
    ]


def model_fields(arguments: ModelArguments) -> dict[str, Any]:
    """Return the fields that all model classes have, for a layout of one rank."""
    model = {
        name: arguments.get(argument)
        for name, argument, field in BRIDGE_FIELDS
        if _is_written(field, ROWS[argument], arguments)
    }
    if any(variant.holds(arguments.get) for variant in (WITH_DELTA_NET, WITH_SPARSE)):
        model["transformer_layer_spec"] = _named_target(_LAYERS_OF_VARIANTS)
    elif _layers_differ_from_default(arguments):
        model["transformer_layer_spec"] = {
            "_target_": _LAYERS_BY_CONTENT,
            "_partial_": True,
            "use_transformer_engine": True,
        }
    return model | {
        "activation_func": _named_target(_activation(arguments)),
        "gated_linear_unit": is_gated(arguments),
        "share_embeddings_and_output_weights": not arguments.untie_embeddings_and_output_weights,
        "seq_length": arguments.max_position_embeddings,
        "should_pad_vocab": True,
        "params_dtype": _named_target(str(arguments.job.params_dtype)),
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }


def _layers_differ_from_default(arguments: ModelArguments) -> bool:
    if WITH_PATTERN.holds(arguments.get):
        return False
    return bool(arguments.multi_latent_attention or (arguments.num_experts and not experts_everywhere(arguments)))


def _is_written(field: BridgeField, row: Argument[Any, Any], arguments: ModelArguments) -> bool:
    if not field.is_written or not (field.only_with is None or field.only_with.holds(arguments.get)):
        return False
    return not field.only_if_changed or arguments.get(row.name) not in (None, row.neutral)


def _activation(arguments: ModelArguments) -> str:
    if arguments.swiglu:
        return "torch.nn.functional.silu"
    if arguments.quick_geglu:
        return "megatron.core.fusions.fused_bias_geglu.quick_gelu"
    if arguments.squared_relu:
        return _SQUARED_RELU
    approximated = arguments.bias_gelu_fusion or arguments.openai_gelu
    return "megatron.core.activations.fast_gelu" if approximated else _EXACT_GELU


def _named_target(target: str) -> dict[str, Any]:
    return {"_target_": target, "_call_": False}
