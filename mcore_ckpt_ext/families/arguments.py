"""Megatron's arguments of a job, completed, and the sizes of parameters that follow from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError

Arguments = Mapping[str, Any]

# What an argument means where a checkpoint does not have it, because its version did not yet (megatron/training/
# arguments.py and TransformerConfig, megatron/core/transformer/transformer_config.py, core_v0.7.0 to 0.19.2).
_DEFAULTS: dict[str, Any] = {
    "normalization": "LayerNorm", "layernorm_epsilon": 1e-5, "layernorm_zero_centered_gamma": False,
    "position_embedding_type": "learned_absolute", "rotary_base": 10000, "rotary_percent": 1.0,
    "rotary_interleaved": False, "use_rope_scaling": False, "rope_scaling_factor": 8.0, "no_rope_freq": None,
    "rotary_seq_len_interpolation_factor": None, "window_size": None, "window_attn_skip_freq": None,
    "swiglu": False, "squared_relu": False, "quick_geglu": False, "openai_gelu": False, "bias_gelu_fusion": True,
    "gated_linear_unit": False, "add_bias_linear": True, "add_qkv_bias": False, "qk_layernorm": False,
    "qk_l2_norm": False, "attention_output_gate": False, "softmax_type": "vanilla", "softmax_scale": None,
    "apply_residual_connection_post_layernorm": False, "untie_embeddings_and_output_weights": False,
    "init_method_std": 0.02, "attention_dropout": 0.1, "hidden_dropout": 0.1, "multi_latent_attention": False,
    "num_experts": None, "moe_layer_freq": 1, "moe_router_topk": 2, "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False, "moe_router_num_groups": None,
    "moe_router_group_topk": None, "moe_router_topk_scaling_factor": None, "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False, "moe_aux_loss_coeff": 0.0,
    "mtp_num_layers": None, "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128, "rope_type": None, "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "kv_channels": None,
    "transformer_impl": "transformer_engine", "attention_softcap": None, "final_logit_softcap": None,
    "scaled_embeddings": False,
}  # fmt: skip
_OLD_NAMES = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}


def complete(arguments: Arguments) -> dict[str, Any]:
    """All arguments that a family looks at, the missing ones with what their absence means."""
    known = {name: value for name, value in arguments.items() if value is not None or name not in _DEFAULTS}
    for old, new in _OLD_NAMES.items():
        if known.get(old) is not None:
            known.setdefault(new, known[old])
    found = {**_DEFAULTS, **known}
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not found.get(name):
            raise UnsupportedCheckpointError(
                "the checkpoint does not say of what size its model is", expected=name,
                helps="only checkpoints that hold Megatron's arguments can be converted to Hugging Face",
            )  # fmt: skip
    heads = found["num_attention_heads"]
    if not found.get("group_query_attention"):
        found["num_query_groups"] = heads
    found["kv_channels"] = found["kv_channels"] or found["hidden_size"] // heads
    found["ffn_hidden_size"] = found.get("ffn_hidden_size") or 4 * found["hidden_size"]
    found["moe_ffn_hidden_size"] = found["moe_ffn_hidden_size"] or found["ffn_hidden_size"]
    if found.get("use_rotary_position_embeddings"):
        found["position_embedding_type"] = "rope"
    return found


def has_experts(arguments: Arguments, layer: int) -> bool:
    """Whether a decoder layer has experts (`get_gpt_decoder_layer_specs`, models/gpt/gpt_layer_specs.py)."""
    if not arguments["num_experts"]:
        return False
    frequency = arguments["moe_layer_freq"]
    return bool(frequency[layer]) if isinstance(frequency, (list, tuple)) else layer % int(frequency) == 0


def is_gated(arguments: Arguments) -> bool:
    """Whether `linear_fc1` holds a gate, too."""
    return any(arguments[name] for name in ("swiglu", "quick_geglu", "gated_linear_unit"))


def parameter_shape(name: str, arguments: Arguments) -> tuple[int, ...]:
    """The shape of a parameter of `GPTModel`, the vocabulary not padded.

    Sources, core_v0.12 to 0.19.2: attention.py, multi_latent_attention.py, mlp.py, moe/ of megatron/core/transformer.

    Args:
        name: model-space name.
        arguments: from `complete`, with `vocab_size`.

    Raises:
        UnsupportedCheckpointError: no rule says so.
    """
    *_, module, leaf = ["", *name.split(".")]
    if leaf in ("expert_bias", "gate_weight"):
        return (int(arguments["num_experts"]),) if leaf == "expert_bias" else (1, int(arguments["hidden_size"]))
    found = _linear(name, module, arguments) or _norm(name, arguments)
    if found is None:
        raise UnsupportedCheckpointError("it is not known of what shape a parameter is", where=name)
    if leaf.startswith("layer_norm_"):
        return found[-1:]
    return found[:1] if leaf == "bias" else found


def _linear(name: str, module: str, arguments: Arguments) -> tuple[int, int] | None:
    """(output features, input features)."""

    def size(argument: str) -> int:
        return int(arguments[argument] or 0)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    gates = 2 if is_gated(arguments) else 1
    ffn = size(
        "moe_ffn_hidden_size" if ".experts.experts." in name
        else "moe_shared_expert_intermediate_size" if ".shared_experts." in name
        else "ffn_hidden_size"
    )  # fmt: skip
    latent = size("qk_head_dim") + size("qk_pos_emb_head_dim")
    values = size("v_head_dim") if arguments["multi_latent_attention"] else size("kv_channels")
    shapes = {
        "word_embeddings": (size("vocab_size"), hidden),
        "position_embeddings": (size("max_position_embeddings"), hidden),
        "output_layer": (size("vocab_size"), hidden),
        "linear_qkv": ((heads + 2 * size("num_query_groups")) * size("kv_channels"), hidden),
        "linear_proj": (hidden, heads * values),
        "linear_q_proj": (heads * latent, hidden),
        "linear_q_down_proj": (size("q_lora_rank"), hidden),
        "linear_q_up_proj": (heads * latent, size("q_lora_rank")),
        "linear_kv_down_proj": (size("kv_lora_rank") + size("qk_pos_emb_head_dim"), hidden),
        "linear_kv_up_proj": (heads * (size("qk_head_dim") + size("v_head_dim")), size("kv_lora_rank")),
        "linear_fc1": (gates * ffn, hidden),
        "linear_fc2": (hidden, ffn),
        "router": (size("num_experts"), hidden),
    }
    return shapes.get(module)


def _norm(name: str, arguments: Arguments) -> tuple[int, ...] | None:
    latent = arguments["multi_latent_attention"]
    widths = {
        "input_layernorm": "hidden_size", "pre_mlp_layernorm": "hidden_size", "final_layernorm": "hidden_size",
        "q_layernorm": "q_lora_rank" if latent else "kv_channels", "k_layernorm": "kv_channels",
        "kv_layernorm": "kv_lora_rank", "post_layernorm": "hidden_size",
    }  # fmt: skip
    match = re.search(r"(\w+norm)\.(?:weight|bias)$", name)
    return (int(arguments[widths[match[1]]] or 0),) if match and match[1] in widths else None


# Names as the Transformer Engine spec stores them, and as the local one does (`sharded_state_dict_keys_map` of
# gpt_layer_specs.py; with latent attention its norms are modules of their own under their own names).
_LATENT_LOCAL = {
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
_LOCAL = {".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_"}


def spec_name(name: str, arguments: Arguments) -> str:
    """The model-space name under the layer spec that the arguments choose, of one under Transformer Engine's."""
    if arguments["transformer_impl"] == "local":
        for engine, local in (_LATENT_LOCAL if arguments["multi_latent_attention"] else _LOCAL).items():
            name = name.replace(engine, local)
    return name
