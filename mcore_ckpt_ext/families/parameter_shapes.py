"""Shapes of parameters from the arguments of a model, and their names under its layer spec."""

from __future__ import annotations

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.job.model_arguments import ModelArguments, is_gated
from mcore_ckpt_ext.model_space.names import LayerSpec, is_of_experts, module_and_leaf, under_spec


def parameter_shape(name: str, arguments: ModelArguments) -> tuple[int, ...]:
    """Return the shape of a parameter of `GPTModel`, without vocabulary padding.

    Sources, core_v0.12 to 0.19.2: attention.py, multi_latent_attention.py, mlp.py, moe/ of megatron/core/transformer.

    Args:
        name: model-space name of the parameter.
        arguments: arguments of the model, with `vocab_size`.

    Raises:
        UnsupportedCheckpointError: the parameter is unknown.
    """
    module, leaf = module_and_leaf(name)
    if leaf in ("expert_bias", "gate_weight"):
        return (arguments.num_experts or 0,) if leaf == "expert_bias" else (1, arguments.hidden_size)
    if leaf == "softmax_offset":
        return (arguments.num_attention_heads,)
    shape = _linear(name, module, arguments) or _norm(module, leaf, arguments)
    if shape is None:
        raise UnsupportedCheckpointError("the shape of a parameter is unknown", where=name)
    if leaf.startswith("layer_norm_"):
        return shape[-1:]
    return shape[:1] if leaf == "bias" else shape


def _linear(name: str, module: str, arguments: ModelArguments) -> tuple[int, int] | None:
    """Return (output features, input features) of a linear layer; None if it is unknown."""

    def size(argument: str) -> int:
        return int(arguments.value(argument) or 0)

    hidden = size("hidden_size")
    heads = size("num_attention_heads")
    gates = 2 if is_gated(arguments) else 1
    gated = 2 if arguments.attention_output_gate else 1
    ffn = size(
        "moe_ffn_hidden_size"
        if is_of_experts(name)
        else "moe_shared_expert_intermediate_size"
        if ".shared_experts." in name
        else "ffn_hidden_size"
    )
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
        "input_layernorm": "hidden_size",
        "pre_mlp_layernorm": "hidden_size",
        "final_layernorm": "hidden_size",
        "q_layernorm": "q_lora_rank" if latent else "kv_channels",
        "k_layernorm": "kv_channels",
        "kv_layernorm": "kv_lora_rank",
        "post_layernorm": "hidden_size",
        "enorm": "hidden_size",
        "hnorm": "hidden_size",
    }
    is_norm = module in widths and leaf in ("weight", "bias")
    return (int(arguments.value(widths[module]) or 0),) if is_norm else None


def spec_name(name: str, arguments: ModelArguments) -> str:
    """Convert a name of Transformer Engine's layer spec to the spec of the arguments."""
    if arguments.transformer_impl != "local":
        return name
    return under_spec(name, LayerSpec.LOCAL_LATENT if arguments.multi_latent_attention else LayerSpec.LOCAL)
