"""`run_config.yaml`, from which Megatron-Bridge knows the model of a checkpoint.

Source: `load_model_config` (training/model_load_save.py) and the providers below models/ of megatron-bridge 0.3.1. JSON
is YAML, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.families.arguments import ModelArguments, is_gated
from mcore_ckpt_ext.families.family import Family

# Fields of the providers that have the names of Megatron's arguments.
_SAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "vocab_size", "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved",
    "attention_dropout", "hidden_dropout", "init_method_std", "window_size", "window_attn_skip_freq",
    "no_rope_freq", "mtp_num_layers", "softmax_type", "glu_linear_offset", "activation_func_clamp_value",
)  # fmt: skip
_EXPERTS = (
    "moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "moe_router_pre_softmax", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
    "moe_aux_loss_coeff", "moe_grouped_gemm",
)  # fmt: skip
# Outside latent attention they are called `yarn_...` there.
_YARN = {
    "yarn_rotary_scaling_factor": "rotary_scaling_factor", "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
    **{name: name for name in (
        "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
        "yarn_correction_range_round_to_int",
    )},
}  # fmt: skip
_LATENT = (
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
    "original_max_position_embeddings",
)  # fmt: skip
# Of attention that is not the usual one: its fields, and what builds its layers (qwen/qwen35_bridge.py,
# glm_moe_dsa/glm5_bridge.py, 0.6.0 and the development head of August 2026).
_VARIANTS = {
    "gated_delta_net": (
        "experimental_attention_variant", "attention_output_gate", "linear_attention_freq", "linear_conv_kernel_dim",
        "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    ),
    "dsa": (
        "experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk",
        "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset", "dsa_indexer_rope_interleaved",
        "dsa_indexer_rotate_activation", "dsa_indexer_scoring_relu", "dsa_indexer_k_norm_epsilon",
        "dsa_indexer_k_norm_fp32",
    ),
}  # fmt: skip
_LAYERS_OF_VARIANTS = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs."
    "get_transformer_block_with_experimental_attention_variant_spec"
)

_SQUARED_RELU, _EXACT_GELU = "megatron.core.activations.squared_relu", "torch.nn.functional.gelu"


def run_config(
    family: Family, arguments: ModelArguments, whole: Mapping[str, Any] | None = None, **sections: Any
) -> str:
    """The file's text for a model that nobody has trained yet.

    `whole`: what `model` says of a model with other parts; `sections`: further ones.
    """
    content = {
        "model": {**bridge_model(family, arguments), **(whole or {})},
        "checkpoint": {"save_rng": False, "save_optim": False, "fully_parallel_save": True},
        **sections,
    }
    # YAML 1.1, which PyYAML reads, takes 1e-06 for text and 1.0e-06 for a number.
    return re.sub(r"(?<=: )(-?\d+)e(?=[+-]\d)", r"\1.0e", json.dumps(content, indent=2)) + "\n"


def bridge_model(family: Family, arguments: ModelArguments) -> dict[str, Any]:
    """The section `model`: its class, and the fields of that; the layout is one rank's."""
    of_all = "mla_provider.MLAModelProvider" if arguments.multi_latent_attention else "gpt_provider.GPTModelProvider"
    model = {
        **model_fields(arguments),
        "_target_": f"megatron.bridge.models.{family.bridge_provider or of_all}",
        "_call_": True,
        **family.bridge_fields(arguments),
    }
    if family.bridge_provider and _activation(arguments) not in (_SQUARED_RELU, _EXACT_GELU):
        del model["activation_func"]  # the family's own
    return {name: value for name, value in model.items() if name not in family.bridge_lacks}


def model_fields(arguments: ModelArguments) -> dict[str, Any]:
    """The fields of a model, of whatever class it may be; the layout is one rank's."""
    experts, latent = _EXPERTS if arguments.num_experts else (), _LATENT if arguments.multi_latent_attention else ()
    variant = _VARIANTS.get(arguments.experimental_attention_variant or "", ())
    model = {name: arguments.value(name) for name in (*_SAME, *experts, *latent, *variant)}
    if variant:
        model["transformer_layer_spec"] = _named(_LAYERS_OF_VARIANTS)
    if arguments.position_embedding_type == "yarn":
        model |= {name: arguments.value(ours) for name, ours in _YARN.items()}
    return model | {
        "activation_func": _named(_activation(arguments)),
        "gated_linear_unit": is_gated(arguments),
        "share_embeddings_and_output_weights": not arguments.untie_embeddings_and_output_weights,
        "seq_length": arguments.max_position_embeddings,
        "rope_scaling": arguments.use_rope_scaling,
        "rope_scaling_factor": arguments.rope_scaling_factor,
        "seq_len_interpolation_factor": arguments.rotary_seq_len_interpolation_factor,
        "num_moe_experts": arguments.num_experts,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": arguments.job.make_vocab_size_divisible_by,
        "bf16": arguments.job.bf16,
        "fp16": arguments.job.fp16,
        "params_dtype": _named(str(arguments.job.params_dtype)),
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }


def _activation(arguments: ModelArguments) -> str:
    if arguments.swiglu:
        return "torch.nn.functional.silu"
    if arguments.quick_geglu:
        return "megatron.core.fusions.fused_bias_geglu.quick_gelu"
    if arguments.squared_relu:
        return _SQUARED_RELU
    approximated = arguments.bias_gelu_fusion or arguments.openai_gelu
    return "megatron.core.activations.fast_gelu" if approximated else _EXACT_GELU


def _named(target: str) -> dict[str, Any]:
    return {"_target_": target, "_call_": False}
