"""Rules, settings and shapes of models with a gated delta net instead of attention in most layers.

Sources: megatron/core/ssm/gated_delta_net/ and models/gpt/experimental_attention_variant_module_specs.py
(core_v0.19.2), which stores the rows of `in_proj` and `conv1d` in parts with separate keys;
transformers/models/qwen3_next/modeling_qwen3_next.py (5.23), which stores them head by head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.family import Family, Piece, Rule
from mcore_ckpt_ext.families.rows import shift_all
from mcore_ckpt_ext.families.settings import CheckedKeys, Custom, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments
from mcore_ckpt_ext.layout.parameter_parts import rows_of_net

_OURS = "decoder.layers.{layer}.self_attention"
_THEIRS = "model.layers.{layer}.linear_attn"
_LINEAR = "linear_attention"
_FULL = "full_attention"


def is_linear(arguments: ModelArguments, layer: int) -> bool:
    """Return whether a layer has a gated delta net (`get_linear_attention_pattern`)."""
    frequency = arguments.linear_attention_freq
    if isinstance(frequency, Sequence):
        return bool(frequency[layer])
    return frequency is not None and (layer + 1) % frequency != 0


def has_attention(arguments: ModelArguments, layer: int) -> bool:
    """Return whether a layer has attention."""
    return not is_linear(arguments, layer)


def _sizes(arguments: ModelArguments) -> dict[str, int]:
    """Return the number of rows of each part for one key head, by name."""
    return {part: rows // arguments.linear_num_key_heads for part, rows in rows_of_net(arguments).items()}


def interleave_heads(*names: str) -> Any:
    """Return a function for the rows of the named parts, one key head after the other."""

    def pieces(arguments: ModelArguments) -> Iterator[Piece]:
        sizes = _sizes(arguments)
        for head in range(arguments.linear_num_key_heads):
            yield from ((f".{name}", head * sizes[name], sizes[name]) for name in names)

    return lambda arguments: list(pieces(arguments))


def pieces_by_parts(*names: str) -> Any:
    """Return a function for the rows of the named parts, one part after the other."""

    def pieces(arguments: ModelArguments) -> list[Piece]:
        sizes = _sizes(arguments)
        heads = arguments.linear_num_key_heads
        return [(f".{name}", 0, heads * sizes[name]) for name in names]

    return pieces


def _net(theirs: str, ours: str, **more: Any) -> Rule:
    return Rule(f"{_THEIRS}.{theirs}", f"{_OURS}.{ours}", where=is_linear, **more)


ATTENTION = (
    *parts.attention(where=has_attention),
    replace(parts.ATTENTION_OUTPUT, where=has_attention),
    *parts.query_key_norms(has_attention),
    replace(parts.ATTENTION_NORM, where=has_attention),
)
"""Rules of the layers with attention."""
NET = (
    Rule("model.layers.{layer}.input_layernorm.weight", f"{_OURS}.in_proj.layer_norm_weight", where=is_linear),
    _net("conv1d.weight", "conv1d.weight", pieces=pieces_by_parts("query", "key", "value")),
    _net("A_log", "A_log", keeps_dtype=True),
    _net("dt_bias", "dt_bias"),
    _net("out_proj.weight", "out_proj.weight"),
    # transformers stores this norm unchanged, unlike its other norms; Megatron stores all norms minus 1.
    _net("norm.weight", "out_norm.weight", rows=shift_all(1.0), keeps_dtype=True),
)
"""Rules of the layers with a gated delta net, except for the input projection."""
BY_HEADS = (
    _net("in_proj_qkvz.weight", "in_proj.weight", pieces=interleave_heads("query", "key", "value", "z")),
    _net("in_proj_ba.weight", "in_proj.weight", pieces=interleave_heads("beta", "alpha")),
)
BY_PARTS = (
    _net("in_proj_qkv.weight", "in_proj.weight", pieces=pieces_by_parts("query", "key", "value")),
    _net("in_proj_z.weight", "in_proj.weight", pieces=pieces_by_parts("z")),
    _net("in_proj_b.weight", "in_proj.weight", pieces=pieces_by_parts("beta")),
    _net("in_proj_a.weight", "in_proj.weight", pieces=pieces_by_parts("alpha")),
)


def _layers() -> Setting:
    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        layers = range(arguments.num_layers)
        return {"layer_types": [_LINEAR if is_linear(arguments, layer) else _FULL for layer in layers]}

    def to_arguments(config: Config) -> dict[str, Any]:
        layers = range(config["num_hidden_layers"])
        interval = config.get("full_attention_interval") or 4
        usual = [(layer + 1) % interval != 0 for layer in layers]
        kinds = config.get("layer_types")
        linear_layers = usual if kinds is None else [kind == _LINEAR for kind in kinds]
        if len(linear_layers) != len(layers) or not {*(kinds or ())} <= {_LINEAR, _FULL}:
            others = ", ".join(sorted({str(kind) for kind in kinds or ()} - {_LINEAR, _FULL}))
            counts = f"{quantity(len(linear_layers), 'kind')} for {quantity(len(layers), 'layer')}"
            raise unrepresentable("layer_types", others or counts, f"{_LINEAR} or {_FULL}, for each layer")
        return {
            "linear_attention_freq": interval if linear_layers == usual else [int(linear) for linear in linear_layers]
        }

    keys = ("layer_types", "full_attention_interval")
    return Custom(keys, to_config, to_arguments, expressed=("linear_attention_freq",))


def _check_output_gate(config: Config) -> None:
    """Check the output gate's activation; transformers always uses SiLU."""
    if config.get("output_gate_type") not in (None, "silu", "swish"):
        raise unrepresentable("output_gate_type", config["output_gate_type"], "silu, or swish, which is the same")


SETTINGS: tuple[Setting, ...] = (
    _layers(),
    CheckedKeys("output_gate_type", check=_check_output_gate),
    Size("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
    Size("linear_key_head_dim", "linear_key_head_dim", 128),
    Size("linear_value_head_dim", "linear_value_head_dim", 128),
    Size("linear_num_key_heads", "linear_num_key_heads", 16, counted=True),
    Size("linear_num_value_heads", "linear_num_value_heads", 32, counted=True),
    Requires(
        {
            "experimental_attention_variant": "gated_delta_net",
            "attention_output_gate": True,
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "layernorm_zero_centered_gamma": True,
        }
    ),
)


class WithGatedDeltaNets(Family):
    """A family with gated delta nets."""

    needs_engine = True

    @override
    def shape(self, name: str, arguments: ModelArguments) -> tuple[int, ...]:
        sizes = _sizes(arguments)
        heads = arguments.linear_num_key_heads
        rows = {part: heads * size for part, size in sizes.items()}
        whole, _, part = name.rpartition(".")
        if part in rows:
            is_filter = whole.endswith("conv1d.weight")
            return (rows[part], *((1, arguments.linear_conv_kernel_dim) if is_filter else (arguments.hidden_size,)))
        shapes = {
            "A_log": (arguments.linear_num_value_heads,),
            "dt_bias": (arguments.linear_num_value_heads,),
            "in_proj.layer_norm_weight": (arguments.hidden_size,),
            "out_norm.weight": (arguments.linear_value_head_dim,),
            "out_proj.weight": (arguments.hidden_size, rows["value"]),
        }
        shape = shapes.get(name.rpartition(".self_attention.")[2])
        return super().shape(name, arguments) if shape is None else shape

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        return [
            "the norms behind gated delta nets: Megatron stores them less 1, Hugging Face as they are; in a dtype that "
            "is coarser near 1 than near 0, such as bfloat16, the difference is rounded once"
        ]
