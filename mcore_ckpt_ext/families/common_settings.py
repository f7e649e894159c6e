"""Settings shared by several families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.families.attention_settings import head_size, query_groups
from mcore_ckpt_ext.families.config_checks import MOST_COUNTED, Config, checked_size, mismatches, unrepresentable
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Constant, Custom, Implies, Mapped, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments, has_experts


def tied_embeddings(by_default: bool) -> Setting:
    """Return the setting of tied embeddings; `by_default` is the default of Hugging Face's class."""
    key = "tie_word_embeddings"

    def to_arguments(config: Config) -> dict[str, Any]:
        is_tied = config.get(key, by_default)
        if is_tied not in (True, False, None):  # the string "false" would be true
            raise unrepresentable(key, is_tied, "true or false")
        return {"untie_embeddings_and_output_weights": not is_tied}

    return Custom((key,), lambda arguments: {key: not arguments.untie_embeddings_and_output_weights}, to_arguments)


def experts_everywhere(arguments: ModelArguments) -> bool:
    """Return whether all layers of the decoder have experts."""
    return all(has_experts(arguments, layer) for layer in range(arguments.num_layers))


def why_not_everywhere(arguments: ModelArguments) -> list[str]:
    """Return a reason if a layer has no experts."""
    return [] if experts_everywhere(arguments) else ["no experts in all layers"]


def experts_in_every_layer(count: int) -> Setting:
    """Return the setting of experts in every layer, of width `intermediate_size`.

    Args:
        count: the class's default number of experts.
    """
    key = "num_local_experts"

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        return {key: arguments.num_experts, "intermediate_size": arguments.moe_ffn_hidden_size}

    def to_arguments(config: Config) -> dict[str, Any]:
        experts = checked_size(key, config.get(key, count), MOST_COUNTED)
        return {"num_experts": experts, "moe_layer_freq": 1, "moe_ffn_hidden_size": config["intermediate_size"]}

    expressed = ("num_experts", "moe_layer_freq", "moe_ffn_hidden_size")
    return Custom((key, "intermediate_size"), to_config, to_arguments, why_not_everywhere, expressed)


NO_BIASES = {"add_bias_linear": False, "add_qkv_bias": False}


def all_biases_or_none(*keys: str) -> Setting:
    """Return the setting of biases that all matrices of attention and MLP have, or none.

    With `add_bias_linear`, Megatron has a bias in each of them (transformer/attention.py and mlp.py, core_v0.12 to
    0.19.2).

    Args:
        keys: keys of `config.json`, each for the biases of some matrices; False if missing.
    """
    arguments_of_queries = ("add_bias_linear", "add_qkv_bias")

    def to_arguments(config: Config) -> dict[str, Any]:
        switches = {key: config.get(key) or False for key in keys}
        if set(switches.values()) not in ({True}, {False}):
            listed = ", ".join(f"{key} {value}" for key, value in switches.items())
            raise unrepresentable(" and ".join(keys), listed, "True for each, or False for each")
        return dict.fromkeys(arguments_of_queries, switches[keys[0]])

    def why_not(arguments: ModelArguments) -> list[str]:
        queries_alone = arguments.add_qkv_bias and not arguments.add_bias_linear
        return ["biases of queries, keys and values alone"] if queries_alone else []

    return Custom(
        keys,
        lambda arguments: dict.fromkeys(keys, arguments.add_bias_linear),
        to_arguments,
        why_not,
        expressed=arguments_of_queries,
    )


RMS_NORM = Requires({"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False})
SIZES: tuple[Setting, ...] = (
    Size("num_hidden_layers", "num_layers", counted=True),
    Size("hidden_size", "hidden_size"),
    Size("num_attention_heads", "num_attention_heads", counted=True),
    Size("intermediate_size", "ffn_hidden_size"),
    Size("max_position_embeddings", "max_position_embeddings"),
    Size("vocab_size", "vocab_size"),
)
INITIAL: tuple[Setting, ...] = (
    Mapped("initializer_range", "init_method_std", 0.02),
    Implies({"attention_dropout": 0.0, "hidden_dropout": 0.0}),
)
TRAINING: tuple[Setting, ...] = (*INITIAL, Mapped("attention_dropout", "attention_dropout", 0.0))
# Another name of the same function: `ACT2CLS` of transformers/activations.py, 4.36 to 5.23.
SILU = Constant("hidden_act", "silu", {"swiglu": True}, synonyms=("swish",))


def gelu(
    key: str, approximation: str = "gelu_pytorch_tanh", needed: Mapping[str, Any] | None = None, *, exact: bool = False
) -> Setting:
    """Return the setting of GELU, exact or approximated by tanh.

    Megatron uses the approximation if bias and activation are fused (fusions/fused_bias_gelu.py and
    fused_bias_geglu.py), and the exact function if they are separate (`torch.nn.functional.gelu`, transformer/mlp.py,
    core_v0.12 to 0.19.2).

    Args:
        key: key of `config.json`.
        approximation: name of the approximation in a written `config.json`.
        needed: arguments that all models of the family have.
        exact: a missing key means the exact function instead of the approximation.
    """
    arguments_needed = {"swiglu": False, **(needed or {})}

    def to_arguments(config: Config) -> dict[str, Any]:
        activation = config.get(key, "gelu" if exact else approximation)
        if activation not in ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
            raise unrepresentable(key, activation, f"gelu or {approximation}")
        return {**arguments_needed, "bias_gelu_fusion": activation != "gelu"}

    return Custom(
        (key,),
        lambda arguments: {key: approximation if arguments.bias_gelu_fusion else "gelu"},
        to_arguments,
        lambda arguments: mismatches(arguments_needed, arguments),
        expressed=(*arguments_needed, "bias_gelu_fusion"),
    )


def llama_like(
    theta: float = 10000.0,
    epsilon: float = 1e-6,
    *,
    head_dim: bool = False,
    head_dim_default: int | None = None,
    groups: int | None = None,
    positions: Setting | None = None,
) -> tuple[Setting, ...]:
    """Return the settings of Llama and of families derived from it.

    Args:
        theta: default of `rope_theta` in Hugging Face's class.
        epsilon: default of `rms_norm_eps`.
        head_dim: `config.json` has the head size even if it follows from the other sizes.
        groups: default of `num_key_value_heads`, unless it follows from other sizes.
        head_dim_default: default of `head_dim`, unless it follows from other sizes.
        positions: the setting of positions, if it is not plain RoPE.
    """
    return (
        *SIZES,
        query_groups(groups),
        head_size(head_dim, head_dim_default),
        positions or Rope(theta),
        tied_embeddings(by_default=False),
        *TRAINING,
        SILU,
        RMS_NORM,
        Mapped("rms_norm_eps", "layernorm_epsilon", epsilon),
    )
