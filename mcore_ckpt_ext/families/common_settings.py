"""The settings that several families have in common."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families.arguments import ModelArguments
from mcore_ckpt_ext.families.settings import (
    Both,
    Config,
    Fixed,
    Needs,
    Same,
    Sets,
    Setting,
    Size,
    checked_size,
    misfits,
    unrepresentable,
)


def tied(by_default: bool) -> Setting:
    """Whether the output layer is the word embedding; `by_default` is the default of Hugging Face's class."""
    key = "tie_word_embeddings"
    return Both(
        (key,),
        lambda arguments: {key: not arguments.untie_embeddings_and_output_weights},
        lambda config: {"untie_embeddings_and_output_weights": not config.get(key, by_default)},
    )


def query_groups(key: str = "num_key_value_heads") -> Setting:
    """Grouped queries."""

    def to_arguments(config: Config) -> dict[str, Any]:
        heads = config["num_attention_heads"]
        groups = checked_size(key, config.get(key) or heads)
        if heads % groups:
            raise unrepresentable(key, groups, f"a divisor of {heads} heads")
        return {"group_query_attention": groups != heads, "num_query_groups": groups}

    return Both((key,), lambda arguments: {key: arguments.num_query_groups}, to_arguments)


def head_size(always: bool = False) -> Setting:
    """`head_dim`; written `always`, or only where it does not follow from the other sizes."""

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        implied = arguments.kv_channels * arguments.num_attention_heads == arguments.hidden_size
        return {} if implied and not always else {"head_dim": arguments.kv_channels}

    def to_arguments(config: Config) -> dict[str, Any]:
        implied = config["hidden_size"] // config["num_attention_heads"]
        return {"kv_channels": checked_size("head_dim", config.get("head_dim") or implied)}

    return Both(("head_dim",), to_config, to_arguments)


def rope_parameters(config: Config, theta: float = 10000.0) -> dict[str, Any]:
    """RoPE as `config.json` says it: with `rope_theta` and `rope_type`.

    Until transformers 4 in `rope_theta` and `rope_scaling` (there `type` before 4.43), since 5 in `rope_parameters`.
    """
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_theta", config.get("rope_theta", theta))
    found.setdefault("rope_type", found.pop("type", "default"))
    return found


def rope(theta: float = 10000.0) -> Setting:
    """Rotary positions: plain, interpolated (`linear`), or scaled as in Llama 3.

    The constants of `llama3` are fixed in Megatron (models/common/embeddings/rotary_pos_embedding.py,
    `_apply_scaling`, core_v0.9.0 to 0.19.2). `theta` is the default of Hugging Face's class.
    """
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        scaling: dict[str, Any] | None = None
        if arguments.use_rope_scaling:
            scaling = {"rope_type": "llama3", "factor": float(arguments.rope_scaling_factor), **fixed}
        elif arguments.rotary_seq_len_interpolation_factor:
            factor = float(arguments.rotary_seq_len_interpolation_factor)
            scaling = {"rope_type": "linear", "factor": factor}
        return {"rope_theta": float(arguments.rotary_base), "rope_scaling": scaling}

    def to_arguments(config: Config) -> dict[str, Any]:
        found = rope_parameters(config, theta)
        base = found["rope_theta"]
        arguments = {
            "position_embedding_type": "rope", "rotary_base": int(base) if base == int(base) else base,
            "use_rope_scaling": False, "rotary_percent": found.get("partial_rotary_factor", 1.0),
        }  # fmt: skip
        kind = found["rope_type"]
        if kind == "llama3":
            for key, value in fixed.items():
                if found.get(key) != value:
                    raise unrepresentable(f"rope_scaling {key}", found.get(key), f"{value}")
            arguments |= {"use_rope_scaling": True, "rope_scaling_factor": float(found["factor"])}
        elif kind == "linear" and found["factor"] == int(found["factor"]):
            arguments |= {"rotary_seq_len_interpolation_factor": int(found["factor"])}
        elif kind != "default":
            raise unrepresentable("rope_scaling", found, "default, linear by a whole factor, or llama3")
        return arguments

    return Both(
        ("rope_parameters", "rope_theta", "rope_scaling"), to_config, to_arguments,
        lambda arguments: misfits({"position_embedding_type": "rope", "rotary_percent": 1.0}, arguments),
    )  # fmt: skip


def window(size: int | None) -> dict[str, Any]:
    """The arguments of a sliding window of `size` tokens, the token itself among them.

    Megatron counts the tokens before it (`get_sliding_window_causal_mask`, megatron/core/transformer/utils.py).
    """
    return {"window_size": (size - 1, 0) if size else None}


def window_of(arguments: ModelArguments) -> int | None:
    """The size of the sliding window in tokens, the token itself among them; None without."""
    return int(arguments.window_size[0]) + 1 if arguments.window_size else None


# What no family here has, and what would change its mathematics if a job had it.
PLAIN = Needs(
    {
        "attention_output_gate": False, "qk_l2_norm": False, "rotary_interleaved": False, "no_rope_freq": None,
        "softmax_type": "vanilla", "apply_residual_connection_post_layernorm": False, "squared_relu": False,
        "quick_geglu": False, "scaled_embeddings": False, "gated_linear_unit": False, "softmax_scale": None,
    }
)  # fmt: skip
NO_WINDOW = Needs({"window_size": None, "window_attn_skip_freq": None})
DENSE = Needs({"num_experts": None})
QUERY_KEY_VALUE = Needs({"multi_latent_attention": False})
RMS_NORM = Needs({"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False})
SIZES: tuple[Setting, ...] = (
    Size("num_hidden_layers", "num_layers", counted=True),
    Size("hidden_size", "hidden_size"),
    Size("num_attention_heads", "num_attention_heads", counted=True),
    Size("intermediate_size", "ffn_hidden_size"),
    Size("max_position_embeddings", "max_position_embeddings"),
    Size("vocab_size", "vocab_size"),
)
TRAINING: tuple[Setting, ...] = (
    Same("initializer_range", "init_method_std", 0.02),
    Same("attention_dropout", "attention_dropout", 0.0),
    Sets({"hidden_dropout": 0.0}),
)
SILU = Fixed("hidden_act", "silu", {"swiglu": True})


def llama_like(theta: float = 10000.0, epsilon: float = 1e-6, *, head_dim: bool = False) -> tuple[Setting, ...]:
    """What the families after Llama have in common.

    Args:
        theta: the default of `rope_theta` in Hugging Face's class.
        epsilon: that of `rms_norm_eps`.
        head_dim: their `config.json` says the size of a head even where it follows from the others.
    """
    return (
        *SIZES, query_groups(), head_size(always=head_dim), rope(theta), tied(by_default=False), *TRAINING, SILU,
        RMS_NORM, PLAIN, QUERY_KEY_VALUE, Same("rms_norm_eps", "layernorm_epsilon", epsilon),
    )  # fmt: skip


def sliding_window(absent: int | None) -> Setting:
    """A window that all layers see; `absent` is what a missing key means."""
    key = "sliding_window"
    return Both(
        (key,),
        lambda arguments: {key: window_of(arguments)},
        lambda config: window(config.get(key, absent)),
    )
