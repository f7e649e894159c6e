"""The model that follows from the arguments of a job, and the sizes of parameters that follow from the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.job.arguments.kinds import REQUIRED
from mcore_ckpt_ext.job.arguments.model import ModelTable
from mcore_ckpt_ext.job.arguments.row import Complete, rows_of
from mcore_ckpt_ext.model_space.names import LayerSpec, module_and_leaf, of_experts, under_spec

MODEL_ARGUMENTS = rows_of(ModelTable)
"""The rows of the arguments that define a model, by name."""
_DEFAULTS = {name: row.values.default for name, row in MODEL_ARGUMENTS.items() if row.values.default is not REQUIRED}


@dataclass(frozen=True, kw_only=True)
class ModelArguments(ModelTable, Complete):
    """Everything that defines a model: each row of `ModelTable` is an attribute, and has a value.

    None is Megatron's own None.

    Attributes:
        job: what the job states, from which this was made.
        values: the arguments by name; those of the job, or their defaults.
    """

    job: JobArguments = field(repr=False)
    values: Mapping[str, Any]

    def value_of(self, name: str) -> Any:
        """An argument that defines a model, by its name."""
        return self.values[name]

    def changed(self, **changes: Any) -> ModelArguments:
        """Return the model with these values of some arguments in place of its own.

        Raises:
            TypeError: one of them does not define a model.
        """
        if others := changes.keys() - MODEL_ARGUMENTS.keys():
            raise TypeError(f"no arguments of a model: {', '.join(sorted(others))}")
        return replace(self, values={**self.values, **changes})

    def value(self, name: str) -> Any:
        """An argument that a table names; if the model does not depend on it, what the job states, or None.

        Raises:
            UnsupportedCheckpointError: nothing here looks at it, and the job does not state it either.
        """
        return self.values[name] if name in self.values else self.job.value(name)

    def stated_value(self, name: str, unknown: Any = None) -> Any:
        """Like `value`, for an argument that many jobs do not have: then `unknown`."""
        return self.values[name] if name in self.values else self.job.stated.get(name, unknown)

    def known(self, name: str) -> Any:
        """Like `value`, for an argument that must be known.

        Raises:
            UnsupportedCheckpointError: it is not.
        """
        value = self.value(name)
        if value is None:
            raise _unsaid(name, self.job)
        return value

    def stated(self) -> dict[str, Any]:
        """The arguments by name: what the job states, and what that means for the model."""
        return {**self.job.stated, **self.values}


_ROTARY = ("rope", "yarn", "mrope")


def complete(job: JobArguments) -> ModelArguments:
    """The model that follows from the arguments of a job.

    Raises:
        UnsupportedCheckpointError: the job does not say how large it is, or, as a description of another loop, what the
            base of its rotary positions is.
    """
    known = {name: value for name in MODEL_ARGUMENTS if (value := job.value_of(name)) is not None}
    for old, new in (("norm_epsilon", "layernorm_epsilon"), ("apply_layernorm_1p", "layernorm_zero_centered_gamma")):
        if (value := getattr(job, old)) is not None:
            known.setdefault(new, value)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not known.get(name):
            raise _unsaid(name, job)
    hidden, heads = known["hidden_size"], known["num_attention_heads"]
    if not job.group_query_attention:
        known["num_query_groups"] = heads
    elif not known.get("num_query_groups"):
        raise _unsaid("num_query_groups", job)
    known["kv_channels"] = known.get("kv_channels") or hidden // heads
    known["ffn_hidden_size"] = known.get("ffn_hidden_size") or 4 * hidden
    known["moe_ffn_hidden_size"] = known.get("moe_ffn_hidden_size") or known["ffn_hidden_size"]
    if job.use_rotary_position_embeddings:
        known["position_embedding_type"] = "rope"
    if not job.is_complete and known.get("position_embedding_type") in _ROTARY and "rotary_base" not in known:
        raise UnsupportedCheckpointError(
            "the rotary base of the checkpoint is unknown", expected="rotary_base", where=job.source,
            helps="say it: --argument rotary_base=500000, for example, and, where positions are scaled, "
            "use_rope_scaling and rope_scaling_factor",
        )  # fmt: skip
    return ModelArguments(job=job, values={**_DEFAULTS, **known})


def _unsaid(name: str, job: JobArguments) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "the model size of the checkpoint is unknown", expected=name, where=job.source,
        helps="only checkpoints that hold Megatron's arguments can be converted to Hugging Face",
    )  # fmt: skip


def has_experts(arguments: ModelArguments, layer: int) -> bool:
    """Whether a decoder layer has experts (`get_gpt_decoder_layer_specs`, models/gpt/gpt_layer_specs.py)."""
    if not arguments.num_experts:
        return False
    frequency = arguments.moe_layer_freq
    return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])


def is_gated(arguments: ModelArguments) -> bool:
    """Whether `linear_fc1` holds a gate, too."""
    return any(arguments.value(name) for name in ("swiglu", "quick_geglu", "gated_linear_unit"))


def parameter_shape(name: str, arguments: ModelArguments) -> tuple[int, ...]:
    """The shape of a parameter of `GPTModel`, the vocabulary not padded.

    Sources, core_v0.12 to 0.19.2: attention.py, multi_latent_attention.py, mlp.py, moe/ of megatron/core/transformer.

    Args:
        name: model-space name.
        arguments: from `complete`, with `vocab_size`.

    Raises:
        UnsupportedCheckpointError: no rule says so.
    """
    module, leaf = module_and_leaf(name)
    if leaf in ("expert_bias", "gate_weight"):
        return (arguments.num_experts or 0,) if leaf == "expert_bias" else (1, arguments.hidden_size)
    if leaf == "softmax_offset":
        return (arguments.num_attention_heads,)
    found = _linear(name, module, arguments) or _norm(module, leaf, arguments)
    if found is None:
        raise UnsupportedCheckpointError("the shape of a parameter is unknown", where=name)
    if leaf.startswith("layer_norm_"):
        return found[-1:]
    return found[:1] if leaf == "bias" else found


def _linear(name: str, module: str, arguments: ModelArguments) -> tuple[int, int] | None:
    """(output features, input features)."""

    def size(argument: str) -> int:
        return int(arguments.value(argument) or 0)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    gates, gated = 2 if is_gated(arguments) else 1, 2 if arguments.attention_output_gate else 1
    ffn = size(
        "moe_ffn_hidden_size" if of_experts(name)
        else "moe_shared_expert_intermediate_size" if ".shared_experts." in name
        else "ffn_hidden_size"
    )  # fmt: skip
    latent = size("qk_head_dim") + size("qk_pos_emb_head_dim")
    values = size("v_head_dim") if arguments.multi_latent_attention else size("kv_channels")
    shapes = {
        "word_embeddings": (size("vocab_size"), hidden),
        "position_embeddings": (size("max_position_embeddings"), hidden),
        "output_layer": (size("vocab_size"), hidden),
        "linear_qkv": ((gated * heads + 2 * size("num_query_groups")) * size("kv_channels"), hidden),
        "linear_proj": (hidden, heads * values),
        "linear_q_proj": (heads * latent, hidden),
        "linear_q_down_proj": (size("q_lora_rank"), hidden),
        "linear_q_up_proj": (heads * latent, size("q_lora_rank")),
        "linear_kv_down_proj": (size("kv_lora_rank") + size("qk_pos_emb_head_dim"), hidden),
        "linear_kv_up_proj": (heads * (size("qk_head_dim") + size("v_head_dim")), size("kv_lora_rank")),
        "linear_fc1": (gates * ffn, hidden),
        "linear_fc2": (hidden, ffn),
        "router": (size("num_experts"), hidden),
        "eh_proj": (hidden, 2 * hidden),
    }
    return shapes.get(module)


def _norm(module: str, leaf: str, arguments: ModelArguments) -> tuple[int, ...] | None:
    latent = arguments.multi_latent_attention
    widths = {
        "input_layernorm": "hidden_size", "pre_mlp_layernorm": "hidden_size", "final_layernorm": "hidden_size",
        "q_layernorm": "q_lora_rank" if latent else "kv_channels", "k_layernorm": "kv_channels",
        "kv_layernorm": "kv_lora_rank", "post_layernorm": "hidden_size",
        "enorm": "hidden_size", "hnorm": "hidden_size",
    }  # fmt: skip
    known = module in widths and leaf in ("weight", "bias")
    return (int(arguments.value(widths[module]) or 0),) if known else None


def spec_name(name: str, arguments: ModelArguments) -> str:
    """A model-space name of Transformer Engine's layer spec, under the spec that the arguments choose."""
    if arguments.transformer_impl != "local":
        return name
    return under_spec(name, LayerSpec.LOCAL_LATENT if arguments.multi_latent_attention else LayerSpec.LOCAL)
