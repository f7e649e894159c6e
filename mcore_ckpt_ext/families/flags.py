"""The flags of `pretrain_gpt.py` for a model that comes from Hugging Face.

`--use-checkpoint-args` adopts only some of them (`load_args_from_checkpoint`, megatron/training/checkpointing.py,
core_v0.19.2: neither the norms' epsilon nor anything of latent attention, for example).
"""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.families.arguments import ModelArguments

# Arguments with a value, and the value that they have without a flag (megatron/training/arguments.py, 0.12 to 0.19.2).
_VALUES: dict[str, Any] = {
    "num_layers": None, "mtp_num_layers": None,
    "hidden_size": None, "ffn_hidden_size": None, "num_attention_heads": None, "kv_channels": None,
    "max_position_embeddings": None, "position_embedding_type": "learned_absolute",
    "rotary_base": 10000, "rotary_percent": 1.0, "rope_scaling_factor": 8.0,
    "rotary_seq_len_interpolation_factor": None,
    "normalization": "LayerNorm", "layernorm_epsilon": None, "init_method_std": 0.02, "attention_dropout": 0.1,
    "hidden_dropout": 0.1, "window_size": None, "window_attn_skip_freq": None, "no_rope_freq": None,
    "softmax_type": "vanilla", "glu_linear_offset": 0.0, "activation_func_clamp_value": None,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": None, "moe_ffn_hidden_size": None, "moe_router_topk": 2, "moe_layer_freq": 1,
    "moe_router_score_function": "softmax", "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None,
    "moe_router_group_topk": None, "moe_shared_expert_intermediate_size": None, "moe_aux_loss_coeff": 0.0,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
    "rope_type": None, "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
}  # fmt: skip
_LINEAR: dict[str, Any] = {
    "experimental_attention_variant": None, "linear_attention_freq": None, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_INDEXED: dict[str, Any] = {
    "experimental_attention_variant": None, "dsa_indexer_n_heads": None, "dsa_indexer_head_dim": None,
    "dsa_indexer_topk": None, "dsa_indexer_topk_freq": 1, "dsa_indexer_skip_topk_offset": 0,
    "dsa_indexer_k_norm_epsilon": None,
}  # fmt: skip
# Of models whose layers a pattern tells, and their number with them.
_HYBRID: dict[str, Any] = {
    "hybrid_layer_pattern": None, "mamba_state_dim": 128, "mamba_head_dim": 64, "mamba_num_groups": 8,
    "mamba_num_heads": None, "moe_latent_size": None,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "yarn_original_max_position_embeddings": None,
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0,
}  # fmt: skip
_SWITCHES = (
    "swiglu", "squared_relu", "quick_geglu", "rotary_interleaved", "qk_layernorm", "add_qkv_bias",
    "attention_output_gate", "dsa_indexer_rope_interleaved", "untie_embeddings_and_output_weights",
    "use_rope_scaling", "multi_latent_attention", "layernorm_zero_centered_gamma", "moe_router_pre_softmax",
    "moe_router_enable_expert_bias", "moe_shared_expert_gate", "moe_grouped_gemm",
)  # fmt: skip
_OFF = {"add_bias_linear": "--disable-bias-linear"}
# What no flag says, or none that pretrain_gpt.py passes on to the model, and the value that a job has instead; all of
# it can be said to Megatron-Bridge. The first is passed on since 0.19: until then its model came of `gpt_builder`
# (pretrain_gpt.py of 0.12, gpt_builders.py of 0.16 to 0.18), which leaves it out; `gpt_config_from_args` does not.
_UNSAID_UNTIL_0_18: dict[str, Any] = {"rotary_seq_len_interpolation_factor": None}
_UNSAID_LLAMA_3: dict[str, Any] = {"rope_scaling_factor": 8.0}
_UNSAID_LATENT: dict[str, Any] = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_NAMES = {"layernorm_epsilon": "--norm-epsilon", "layernorm_zero_centered_gamma": "--apply-layernorm-1p"}


def training_flags(arguments: ModelArguments) -> list[str]:
    """The words of the command line that describe the model; the job's own (layout, data, optimizer) are left out."""
    values = dict(_VALUES)
    if arguments.num_experts:
        values |= _EXPERTS
    if arguments.stated_value("hybrid_layer_pattern"):
        values |= _HYBRID
        del values["num_layers"]
    if arguments.dsa_indexer_topk:
        values |= _INDEXED
    if arguments.linear_attention_freq:
        values |= _LINEAR
    if arguments.multi_latent_attention:
        values |= _LATENT
        del values["kv_channels"]
    elif arguments.position_embedding_type == "yarn":
        values |= _YARN
    words: list[str] = []
    for name, default in values.items():
        value = arguments.stated_value(name) if name in _HYBRID else arguments.value(name)
        if value is not None and value != default:
            words += [_flag(name), _word(value)]
    if arguments.num_query_groups != arguments.num_attention_heads:
        words += ["--group-query-attention", "--num-query-groups", str(arguments.num_query_groups)]
    words += [_flag(name) for name in _SWITCHES if arguments.value(name)]
    if arguments.dsa_indexer_topk and not arguments.dsa_indexer_rotate_activation:
        words.append("--no-dsa-indexer-rotate-activation")
    words += [flag for name, flag in _OFF.items() if not arguments.value(name)]
    if arguments.position_embedding_type == "yarn" and not arguments.yarn_correction_range_round_to_int:
        words.append("--no-yarn-correction-range-round-to-int")
    if not (arguments.swiglu or arguments.bias_gelu_fusion):
        words.append("--no-bias-gelu-fusion")
    return words


def unsaid(arguments: ModelArguments, *, since_0_19: bool) -> dict[str, Any]:
    """What of the model no flag of `pretrain_gpt.py` says: such a job computes another one.

    `since_0_19`: it is of that release or a later one.
    """
    values = {} if since_0_19 else dict(_UNSAID_UNTIL_0_18)
    if arguments.use_rope_scaling:
        values |= _UNSAID_LLAMA_3
    if arguments.multi_latent_attention and arguments.rope_type != "rope":
        values |= _UNSAID_LATENT
    found = {name: arguments.value(name) for name, default in values.items() if arguments.value(name) != default}
    if arguments.rotary_base != int(arguments.rotary_base):  # `--rotary-base` takes whole numbers
        found["rotary_base"] = arguments.rotary_base
    return found


def ignored(arguments: ModelArguments) -> dict[str, Any]:
    """What a job was told in flags that some release of `pretrain_gpt.py` does not pass on to its model."""
    values = {**_UNSAID_UNTIL_0_18, **(_UNSAID_LLAMA_3 if arguments.use_rope_scaling else {})}
    return {name: arguments.value(name) for name, default in values.items() if arguments.value(name) != default}


def _flag(name: str) -> str:
    return _NAMES.get(name, f"--{name.replace('_', '-')}")


def _word(value: Any) -> str:
    return str(value).replace(" ", "") if isinstance(value, (list, tuple)) else str(value)
