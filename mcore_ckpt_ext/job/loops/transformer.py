"""Converts Megatron Core's model configuration to Megatron's arguments.

Every training loop stores this configuration.

Sources: `TransformerConfig` and `ModelParallelConfig` (megatron/core/transformer/transformer_config.py,
model_parallel_config.py, core_v0.12.1 to 0.19.2), and the conversion of arguments to fields
(`core_transformer_config_from_args`, megatron/training/arguments.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.job.arguments.conditions import WITH_YARN
from mcore_ckpt_ext.job.arguments.table import BRIDGE_FIELDS

_OF_MODEL = [(name, argument, field.only_with) for name, argument, field in BRIDGE_FIELDS if field.section == "model"]
# Arguments by the names of their fields.
_RENAMED = {name: argument for name, argument, condition in _OF_MODEL if condition is None}
# Fields whose values have another type or another sense than the argument.
_SHARED = "share_embeddings_and_output_weights"
_OTHERWISE = ("params_dtype", "spec", "pipeline_model_parallel_layout", "vocab_size", "lr", "min_lr", _SHARED)
_SILU = ("silu", "swish")
_GELU = ("gelu", "fast_gelu", "gelu_fast", "openai_gelu")
# Fields for YaRN without latent attention (`core_transformer_config_from_args`, since core_v0.15.0, and
# `GPTModelProvider` of Megatron-Bridge); otherwise missing or None.
_YARN = {name: argument for name, argument, condition in _OF_MODEL if condition == WITH_YARN and name != argument}


def model_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in a model's configuration, and its other fields under their own names.

    Args:
        config: the fields by name; values are plain, or the names of objects (see `name_of_object`).
    """
    arguments = {
        _RENAMED.get(name, name): value
        for name, value in config.items()
        if name not in (*_OTHERWISE, *_YARN)
        and name != "activation_func"
        and not name.startswith("_")
        and is_plain(value)
    }
    arguments |= {ours: config[name] for name, ours in _YARN.items() if isinstance(config.get(name), (int, float))}
    if (dtype := name_of_object(config.get("params_dtype"))) is not None:
        arguments["params_dtype"] = dtype
    if (split := config.get("pipeline_model_parallel_layout")) is not None:
        arguments["pipeline_model_parallel_layout"] = split if is_plain(split) else str(name_of_object(split))
    if isinstance(shared := config.get(_SHARED), bool):
        arguments["untie_embeddings_and_output_weights"] = not shared
    groups = config.get("num_query_groups")
    heads = config.get("num_attention_heads")
    if groups is not None and heads is not None:
        arguments["group_query_attention"] = groups != heads
    return arguments | _activation(config)


def _activation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for the MLP's activation, which a configuration stores as a function and a gate."""
    function = name_of_object(config.get("activation_func"))
    gated = config.get("gated_linear_unit")
    if function is None or not isinstance(gated, bool):
        return {}
    activation = function.rpartition(".")[2]
    arguments = {
        "swiglu": gated and activation in _SILU,
        "quick_geglu": gated and activation == "quick_gelu",
        "squared_relu": not gated and activation == "squared_relu",
    }
    is_known = any(arguments.values()) or activation in _GELU
    arguments["gated_linear_unit"] = gated and not any(arguments.values())  # Megatron has no flag for it
    if not is_known:
        return {**arguments, "activation_func": function}
    # Fused GELU is the tanh approximation; by default it is not fused (`bias_activation_fusion`).
    return {**arguments, "bias_gelu_fusion": activation != "gelu" or bool(config.get("bias_activation_fusion"))}


def name_of_object(value: Any) -> str | None:
    """Return the name of a class, function or dtype, such as `torch.bfloat16`; None if it is no name."""
    if isinstance(value, Mapping):
        target = value.get("_target_")
        return target if isinstance(target, str) else None
    return value if isinstance(value, str) else None


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, True, False or None, or a list of these."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
