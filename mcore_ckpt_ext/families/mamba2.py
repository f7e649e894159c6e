"""Mamba 2."""

from __future__ import annotations

from math import inf
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.families.common_settings import NO_BIASES, RMS_NORM, tied_embeddings
from mcore_ckpt_ext.families.config_checks import Config, checked_size, contradictory, unrepresentable
from mcore_ckpt_ext.families.nemotron_h import MIXER, NemotronH, mixer_heads, pattern_of
from mcore_ckpt_ext.families.settings import CheckedKeys, Constant, Custom, Implies, Mapped, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments
from mcore_ckpt_ext.layout.parameter_parts import rows_of_mixer

_POSITIONS = 2048
_HEADS = 128
_HEAD = 64
_HIDDEN = 4096


def _layers() -> Setting:
    def to_arguments(config: Config) -> dict[str, Any]:
        count = checked_size("num_hidden_layers", config.get("num_hidden_layers", 64))
        return {"hybrid_layer_pattern": MIXER * count, "num_layers": count}

    def why_not(arguments: ModelArguments) -> list[str]:
        pattern = pattern_of(arguments)
        is_pure = len(pattern) == arguments.num_layers and {*pattern} == {MIXER}
        return [] if is_pure else [f"no hybrid_layer_pattern of M alone, but {pattern!r}"]

    return Custom(
        ("num_hidden_layers",),
        lambda arguments: {"num_hidden_layers": arguments.num_layers},
        to_arguments,
        why_not,
        expressed=("hybrid_layer_pattern", "hybrid_override_pattern"),
    )


def _expand() -> Setting:
    """Return the setting of a mixer's expansion factor, which must agree with the heads."""

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        return {"expand": rows_of_mixer(arguments)["z"] // arguments.hidden_size}

    def to_arguments(config: Config) -> dict[str, Any]:
        width = config.get("num_heads", _HEADS) * config.get("head_dim", _HEAD)
        hidden = config.get("hidden_size", _HIDDEN)
        factor = config.get("expand", 2)
        if width != hidden * factor:
            raise contradictory("expand", factor, f"heads of {quantity(width, 'element')} for {hidden}")
        return {}

    def why_not(arguments: ModelArguments) -> list[str]:
        is_of_mixers = MIXER in pattern_of(arguments)
        width = rows_of_mixer(arguments)["z"] if is_of_mixers else 0
        return [] if width % arguments.hidden_size == 0 else ["mixers whose width is not a multiple of the hidden size"]

    return Custom(("expand",), to_config, to_arguments, why_not)


def _check_limit(config: Config) -> None:
    """Check that time steps are not limited; transformers 5 writes `{"__float__": "Infinity"}`."""
    low, high = config.get("time_step_limit") or (0.0, inf)
    if low != 0 or high not in (inf, {"__float__": "Infinity"}):
        raise unrepresentable("time_step_limit", config["time_step_limit"], "from 0 to infinity")


def _attention_heads() -> Setting:
    """Return the setting of attention heads, which no layer has: as many as a mixer's.

    Megatron requires that the tensor parallel size divides both numbers (`TransformerConfig.__post_init__`, and
    `MambaMixer.__init__` of megatron/core/ssm/mamba_mixer.py, core_v0.19.2).
    """

    def to_arguments(config: Config) -> dict[str, Any]:
        heads = config.get("num_heads", _HEADS)
        return {"num_attention_heads": heads, "num_query_groups": heads}

    names = ("num_attention_heads", "num_query_groups")
    return Custom((), lambda arguments: {}, to_arguments, expressed=names)


class Mamba2(NemotronH):
    """A model of Nemotron-H's Mamba mixers only.

    Source: transformers/models/mamba2 (5.23), whose norms after a mixer are per group since 5, as in Megatron.
    """

    model_type = "mamba2"
    architecture = "Mamba2ForCausalLM"
    bridge_provider = "mamba.mamba_provider.MambaModelProvider"
    without_effect = (
        "time_step_rank",
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "chunk_size",
        "rms_norm",
        "norm_before_gate",
    )
    settings = (
        _layers(),
        Size("hidden_size", "hidden_size", _HIDDEN),
        Size("vocab_size", "vocab_size", 32768),
        tied_embeddings(by_default=False),
        RMS_NORM,
        Mapped("initializer_range", "init_method_std", 0.1),
        Constant("layer_norm_epsilon", 1e-5, {"layernorm_epsilon": 1e-5}),
        mixer_heads("num_heads", _HEADS),
        Size("head_dim", "mamba_head_dim", _HEAD),
        Size("state_size", "mamba_state_dim", 128),
        Size("n_groups", "mamba_num_groups", 8),
        _expand(),
        Constant("conv_kernel", 4, {}),
        Constant("use_conv_bias", True, {}),
        Constant("hidden_act", "silu", {}),
        Constant("use_bias", False, NO_BIASES),
        CheckedKeys("time_step_limit", check=_check_limit),
        Requires({"position_embedding_type": "none"}),
        # Arguments that Megatron's parser requires but no layer of the model uses.
        Implies(
            {
                "is_hybrid_model": True,
                "ffn_hidden_size": _POSITIONS,
                "kv_channels": 1,
                "max_position_embeddings": _POSITIONS,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "swiglu": False,
                "bias_gelu_fusion": False,
            }
        ),
        _attention_heads(),
    )

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        return super().notices(arguments)[:1]
