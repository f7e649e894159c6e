"""What each argument of Megatron's parser means for the forward pass: each is classified once.

An argument changes the forward pass (here, with the value under which it does not), or it does not
(`without_effect.py`), or it says how the model is built or the batch treated (`TOLD`). A family says which arguments it
expresses (`Setting.expresses`); each other one has to have the value that is given here, or the checkpoint does not
belong to the family. A test asks for the class of every argument of the installed parser.

Read in megatron/training/arguments.py, argument_utils.py, gpt_builders.py and in megatron/core (transformer_config.py,
gpt_model.py, attention.py, mlp.py, router.py, moe_utils.py, experts.py) of core_v0.12.1 to 0.19.2 and the development
head of 22 August 2026.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mcore_ckpt_ext.errors import printable, shown, some
from mcore_ckpt_ext.families.arguments import MODEL_ARGUMENTS, ModelArguments
from mcore_ckpt_ext.families.without_effect import without_effect


@dataclass(frozen=True)
class _AnyBut:
    """Neutral is every value but these; of several at once, each."""

    others: tuple[Any, ...]


# Every family expresses these, by its shapes if not by a setting.
SIZES = frozenset({
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "group_query_attention", "kv_channels",
    "ffn_hidden_size", "vocab_size", "padded_vocab_size", "max_position_embeddings",
    "untie_embeddings_and_output_weights", "layernorm_epsilon", "mtp_num_layers",
})  # fmt: skip
# Other names of the same arguments: in older releases, and in the parser where it differs from the configuration.
ALIASES: Mapping[str, str] = {
    "norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "use_rotary_position_embeddings": "position_embedding_type", "encoder_num_layers": "num_layers",
}  # fmt: skip

NEUTRAL: Mapping[str, Any] = {
    # Norms, biases, residuals.
    "normalization": "LayerNorm", "layernorm_zero_centered_gamma": False, "add_bias_linear": True,
    "apply_residual_connection_post_layernorm": False, "use_mup": False, "enable_hyper_connections": False,
    # Positions.
    "position_embedding_type": "learned_absolute", "no_rope_freq": None,
    # Attention.
    "add_qkv_bias": False, "qk_layernorm": False, "qk_l2_norm": False, "attention_output_gate": False,
    "softmax_type": "vanilla", "window_size": None, "multi_latent_attention": False,
    "experimental_attention_variant": None, "head_wise_attn_gate": False, "csa_compress_ratios": None,
    # The MLP.
    "swiglu": False, "squared_relu": False, "quick_geglu": False, "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    # One that no flag of Megatron's chooses, as other loops write it down.
    "activation_func": None,
    # Of the scripts of ModelOpt, which set what the flags without the beginning do (post_training/model_builder.py).
    "export_qk_l2_norm": False, "export_moe_apply_probs_on_input": False,
    # Experts.
    "num_experts": None,
    # Other models than a decoder of like layers.
    "heterogeneous_layers_config_path": None, "heterogeneous_layers_config_encoded_json": None,
    "hybrid_layer_pattern": None, "hybrid_override_pattern": None, "hybrid_attention_ratio": None,
    "hybrid_mlp_ratio": None, "is_hybrid_model": False, "yaml_cfg": None, "retro_add_retriever": False,
    # Of Megatron-Bridge's providers, not of the parser.
    "gated_linear_unit": False, "softmax_scale": None, "scaled_embeddings": False, "attention_softcap": None,
    "final_logit_softcap": None, "rotary_base_local": None,
    # Of NeMo's, where positions are not scaled as Megatron has it.
    "low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192,
}  # fmt: skip
"""Arguments that change the forward pass, and the value under which they do not."""

ONLY_WITH: Mapping[tuple[str, Any], Mapping[str, Any]] = {
    ("position_embedding_type", "rope"): {
        "rotary_base": 10000, "rotary_percent": 1.0, "rotary_interleaved": False, "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None, "rotary_base_per_layer": None,
    },
    ("position_embedding_type", "yarn"): {
        "rotary_base": 10000, "rotary_percent": 1.0, "rotary_interleaved": False, "rotary_scaling_factor": 1.0,
        "mscale": 1.0, "mscale_all_dim": 0.0, "yarn_original_max_position_embeddings": None, "yarn_beta_fast": None,
        "yarn_beta_slow": None, "yarn_correction_range_round_to_int": None,
    },
    ("position_embedding_type", "mrope"): {"mrope_section": None, "mrope_interleaved": False},
    ("position_embedding_type", "relative"): {
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    },
    # With the fusion, a GELU is approximated by tanh (fused_bias_gelu.py).
    ("swiglu", False): {"bias_gelu_fusion": True},
    ("use_rope_scaling", True): {"rope_scaling_factor": 8.0},
    ("window_size", None): {"window_attn_skip_freq": None},
    ("multi_latent_attention", True): {
        "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
        "rope_type": None, "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "beta_fast": 32,
        "beta_slow": 1, "original_max_position_embeddings": 4096, "o_groups": None, "o_lora_rank": None,
    },
    ("num_experts", None): {
        "moe_layer_freq": 1, "moe_ffn_hidden_size": None, "moe_router_topk": 2, "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False, "moe_router_num_groups": None, "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None, "moe_shared_expert_intermediate_size": None,
        "moe_apply_probs_on_input": False, "moe_latent_size": None, "moe_mlp_glu_interleave_size": None,
        "moe_router_force_load_balancing": False, "moe_router_force_biased": None, "moe_n_hash_layers": 0,
        # A loss or a bias that balances leaves the choice of experts what it is; these make it another (router.py).
        "moe_router_load_balancing_type": _AnyBut(("sinkhorn", "quantile_balancing")),
    },
    # Where scores are sigmoids, it has no effect (`topk_routing_with_score_function`, moe_utils.py).
    ("moe_router_score_function", "softmax"): {"moe_router_pre_softmax": False},
    ("moe_shared_expert_intermediate_size", None): {
        "moe_shared_expert_gate": False, "moe_shared_expert_glu_interleave_size": None,
    },
    ("use_mup", True): {
        "mup_width_mult": 1.0, "mup_base_hidden_size": None, "mup_embedding_mult": 1.0, "mup_output_mult": 1.0,
        "mup_base_head_dim": None, "mup_attn_scale_power": 1.0,
    },
    ("experimental_attention_variant", None): {
        "linear_attention_freq": None, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_attention_type": None, "dsa_indexer_n_heads": None, "dsa_indexer_head_dim": None,
        "dsa_indexer_topk": None, "dsa_indexer_topk_freq": 1, "dsa_indexer_skip_topk_offset": 0,
        "dsa_indexer_rope_interleaved": False, "dsa_indexer_rotate_activation": True,
        "dsa_indexer_scoring_relu": True, "dsa_indexer_k_norm_epsilon": None, "dsa_indexer_k_norm_fp32": False,
    },
    ("csa_compress_ratios", None): {"csa_window_size": None, "csa_compress_rotary_base": None, "csa_dense_mode": False},
    ("enable_hyper_connections", True): {
        "num_residual_streams": 4, "mhc_sinkhorn_iterations": 20, "mhc_init_gating_factor": 0.01,
    },
    ("hybrid_layer_pattern", None): {
        "mamba_state_dim": 128, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_num_heads": None,
        "mtp_hybrid_override_pattern": None,
    },
    ("mtp_num_layers", None): {"mtp_use_repeated_layer": False},
}  # fmt: skip
"""Arguments that count only where another one has a value, or, for None, any value at all: with their neutral ones."""

TOLD: Mapping[str, str] = {
    "spec": "the job builds its layers by a module of its own, and what that computes is not known here",
    "moe_expert_capacity_factor": "the job drops tokens beyond the capacity of an expert; transformers drops none",
    "moe_expert_rank_capacity_factor": "the job drops tokens beyond the capacity of a rank; transformers drops none",
    "moe_input_jitter_eps": "the job's routers see noise, in evaluation as well; those of transformers do not",
}
"""Arguments that a Hugging Face model cannot have, but that leave its weights what they are: a note says so."""

_UNKNOWN = object()


def classified(names: Collection[str]) -> set[str]:
    """Those of the arguments that have a class."""
    dependent = chain.from_iterable(ONLY_WITH.values())
    return without_effect(names) | (set(names) & {*SIZES, *ALIASES, *NEUTRAL, *TOLD, *dependent})


def unexpressed(expressed: Collection[str], arguments: ModelArguments) -> list[str]:
    """The arguments that change the forward pass and that a family does not express, in words.

    Args:
        expressed: the arguments that the family's settings speak of.
        arguments: of the job.
    """
    found = [
        f"{name} is {arguments.stated_value(name)!r}, for which it has no key"
        for name, neutral in _counting(arguments)
        if name not in expressed and not _is_neutral(arguments.stated_value(name, _UNKNOWN), neutral)
    ]
    return list(dict.fromkeys(found))


def differing(a: ModelArguments, b: ModelArguments) -> dict[str, tuple[Any, Any]]:
    """The arguments that change the forward pass, that two jobs state, and state differently."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in ("layernorm_epsilon", *dict(_counting(a)).keys() & dict(_counting(b)).keys()):
        values = a.stated_value(name, _UNKNOWN), b.stated_value(name, _UNKNOWN)
        plain = [list(value) if isinstance(value, tuple) else value or None for value in values]
        if name == "add_qkv_bias" and a.add_bias_linear and b.add_bias_linear:
            continue  # it is one of all biases
        if _UNKNOWN not in values and plain[0] != plain[1]:
            found[name] = values
    return dict(sorted(found.items()))


def told(arguments: ModelArguments) -> list[str]:
    """What a reader of the Hugging Face model should know of the job."""
    return [
        f"--{name.replace('_', '-')} {value}: {why}"
        for name, why in TOLD.items() if (value := arguments.stated_value(name))
    ]  # fmt: skip


_OWN_MARKS = "mcore_ckpt_ext_"  # what this package notes among the arguments of what it writes


def unknown(arguments: ModelArguments) -> list[str]:
    """What a reader should know where the job has arguments that no release of Megatron has that is known here."""
    stated = arguments.job.stated
    known = classified(stated) | MODEL_ARGUMENTS.keys()
    named = {name: value for name, value in stated.items() if name not in known and not name.startswith(_OWN_MARKS)}
    set_ones = [name for name, value in named.items() if isinstance(value, (int, float, str, list, dict)) and value]
    if not set_ones:
        return []
    listed = some([f"{printable(name)} {shown(named[name])}" for name in set_ones])
    return [
        f"arguments that nothing here knows; if one changes what the model computes, this folder does not: {listed}"
    ]


def _counting(arguments: ModelArguments) -> Iterator[tuple[str, Any]]:
    """The arguments that count in a job, and their neutral values."""
    yield from NEUTRAL.items()
    for (name, value), dependent in ONLY_WITH.items():
        found = arguments.stated_value(name)
        if bool(found) if value is None else found == value:
            yield from dependent.items()


def _is_neutral(found: Any, neutral: Any) -> bool:
    if isinstance(neutral, _AnyBut):
        several = found if isinstance(found, (list, tuple)) else [found]
        return not any(one in neutral.others for one in several)
    return found is _UNKNOWN or (found or None) == (neutral or None)
