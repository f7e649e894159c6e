"""The arguments that define a model, from the arguments of a job and Megatron's defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.job.arguments.kinds import REQUIRED
from mcore_ckpt_ext.job.arguments.model import ModelTable
from mcore_ckpt_ext.job.arguments.row import CompleteArguments, rows_of
from mcore_ckpt_ext.job.job_arguments import JobArguments

MODEL_ARGUMENTS = rows_of(ModelTable)
"""The rows of the arguments that define a model, by name."""
FORMER_NAMES: Mapping[str, str] = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
"""Arguments that jobs store under another name before 0.16 (`core_transformer_config_from_args`, arguments.py)."""
_DEFAULTS = {name: row.values.default for name, row in MODEL_ARGUMENTS.items() if row.values.default is not REQUIRED}


@dataclass(frozen=True, kw_only=True)
class ModelArguments(ModelTable, CompleteArguments):
    """All arguments that define a model: each row of `ModelTable` is an attribute with a value.

    A value None means that Megatron itself uses None.

    Attributes:
        job: the arguments of the job.
        values: the values by name, from the job or by default.
    """

    job: JobArguments = field(repr=False)
    values: Mapping[str, Any]

    def value_of(self, name: str) -> Any:
        """Return an argument that defines a model, by name."""
        return self.values[name]

    def replace(self, **changes: Any) -> ModelArguments:
        """Return a copy with some arguments replaced.

        Raises:
            TypeError: an argument does not define a model.
        """
        if others := changes.keys() - MODEL_ARGUMENTS.keys():
            raise TypeError(f"no arguments of a model: {', '.join(sorted(others))}")
        return dataclasses.replace(self, values={**self.values, **changes})

    def value(self, name: str) -> Any:
        """Return an argument that a table names: of the model, or of the job; None if it is unset.

        Raises:
            UnsupportedCheckpointError: this package does not use the argument, and the job does not have it.
        """
        return self.values[name] if name in self.values else self.job.value(name)

    def get(self, name: str, unknown: Any = None) -> Any:
        """Return an argument as `value` does, or `unknown` if the job does not have it."""
        return self.values[name] if name in self.values else self.job.raw.get(name, unknown)

    def require(self, name: str) -> Any:
        """Return an argument that must be set.

        Raises:
            UnsupportedCheckpointError: the argument is unset.
        """
        value = self.value(name)
        if value is None:
            raise _unknown(name, self.job)
        return value

    def as_dict(self) -> dict[str, Any]:
        """Return all arguments by name, those of the job and those of the model."""
        return {**self.job.raw, **self.values}


_ROTARY = ("rope", "yarn", "mrope")
_GATED = ("swiglu", "quick_geglu")
_ACTIVATIONS = {*_GATED, "squared_relu"}


def complete(job: JobArguments) -> ModelArguments:
    """Return the arguments of a job's model, with Megatron's defaults for unset ones.

    Raises:
        UnsupportedCheckpointError: the size of the model is unknown, or the arguments come from another training loop
            and leave open what the model computes (see `_check_stated`).
    """
    arguments = {name: value for name in MODEL_ARGUMENTS if (value := job.value_of(name)) is not None}
    for new, old in FORMER_NAMES.items():
        if (value := getattr(job, old)) is not None:
            arguments.setdefault(new, value)
    _complete_sizes(arguments, job)
    if arguments.get("add_bias_linear") is False:  # as `validate_args` (arguments.py, core_v0.7.0 to 0.19.2)
        arguments.setdefault("bias_gelu_fusion", False)
    if job.use_rotary_position_embeddings:
        arguments["position_embedding_type"] = "rope"
    if not job.is_complete:
        _check_stated(job, arguments)
        if arguments.get("gated_linear_unit") and any(arguments.get(name) for name in _GATED):
            arguments["gated_linear_unit"] = False  # their flags imply the gate (`core_transformer_config_from_args`)
    return ModelArguments(job=job, values={**_DEFAULTS, **arguments})


def _complete_sizes(values: dict[str, Any], job: JobArguments) -> None:
    """Set the sizes that follow from others, in place.

    Raises:
        UnsupportedCheckpointError: a size is unknown.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not values.get(name):
            raise _unknown(name, job)
    if not job.group_query_attention:
        values["num_query_groups"] = values["num_attention_heads"]
    elif not values.get("num_query_groups"):
        raise _unknown("num_query_groups", job)
    values["kv_channels"] = values.get("kv_channels") or values["hidden_size"] // values["num_attention_heads"]
    values["ffn_hidden_size"] = values.get("ffn_hidden_size") or 4 * values["hidden_size"]
    values["moe_ffn_hidden_size"] = values.get("moe_ffn_hidden_size") or values["ffn_hidden_size"]


def _check_stated(job: JobArguments, arguments: Mapping[str, Any]) -> None:
    """Refuse a job of another training loop that leaves open what its model computes.

    Raises:
        UnsupportedCheckpointError: the kind or base of its positions is unknown, or its activation.
    """
    if "position_embedding_type" not in arguments:
        raise UnsupportedCheckpointError(
            "the kind of positions of the checkpoint is unknown",
            expected="position_embedding_type",
            where=job.source,
            hint="pass the one used in training, for example --argument position_embedding_type=rope",
        )
    if arguments["position_embedding_type"] in _ROTARY and "rotary_base" not in arguments:
        raise UnsupportedCheckpointError(
            "the rotary base of the checkpoint is unknown",
            expected="rotary_base",
            where=job.source,
            hint="pass the value used in training, for example --argument rotary_base=500000; with scaled "
            "positions also use_rope_scaling and rope_scaling_factor",
        )
    if not arguments.keys() & _ACTIVATIONS:
        raise UnsupportedCheckpointError(
            "the activation of the checkpoint is unknown",
            expected="swiglu",
            where=job.source,
            hint="pass --argument swiglu=true for SiLU with a gate, as in Llama and Qwen, swiglu=false for GELU",
        )


def _unknown(name: str, job: JobArguments) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "the model size of the checkpoint is unknown",
        expected=name,
        where=job.source,
        hint=f"pass the value used in training: --argument {name}=VALUE",
    )


def has_experts(arguments: ModelArguments, layer: int) -> bool:
    """Return whether a decoder layer has experts.

    Source: `get_gpt_decoder_layer_specs` (models/gpt/gpt_layer_specs.py).
    """
    if not arguments.num_experts:
        return False
    frequency = arguments.moe_layer_freq
    return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])


def is_gated(arguments: ModelArguments | JobArguments) -> bool:
    """Return whether `linear_fc1` also contains a gate."""
    return any(arguments.value(name) for name in ("swiglu", "quick_geglu", "gated_linear_unit"))
