"""The parameters of DeepSeek-V3, 671B, as Megatron's local layer spec names and stores them (bf16 training).

Sizes: the published `config.json` of deepseek-ai/DeepSeek-V3. The layer for multi-token prediction is left out.
"""

from __future__ import annotations

from typing import Any

# For 16 stages; `arguments_for` has others.
LAYERS, DENSE, EXPERTS = 61, 3, 256
HIDDEN, FEED_FORWARD, EXPERT_FEED_FORWARD, HEADS = 7168, 18432, 2048, 128
QUERY_RANK, KEY_RANK, ROTATED, PLAIN, VALUE = 1536, 512, 64, 128, 128
VOCABULARY = 129280


def arguments_for(pipeline: int, expert: int, world: int) -> dict[str, Any]:
    """Return Megatron's arguments for a job without tensor parallelism."""
    first, last = {16: (3, 2), 8: (7, 6)}[pipeline]  # the remaining layers are the same on all other stages
    return {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": FEED_FORWARD, "num_attention_heads": HEADS,
        "padded_vocab_size": VOCABULARY, "swiglu": True, "bf16": True, "transformer_impl": "local",
        "multi_latent_attention": True, "num_experts": EXPERTS, "moe_ffn_hidden_size": EXPERT_FEED_FORWARD,
        "moe_layer_freq": [0] * DENSE + [1] * (LAYERS - DENSE), "untie_embeddings_and_output_weights": True,
        "accumulate_allreduce_grads_in_fp32": True, "use_distributed_optimizer": True,
        "dist_ckpt_strictness": "assume_ok_unexpected", "tensor_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1, "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert, "decoder_first_pipeline_num_layers": first,
        "decoder_last_pipeline_num_layers": last, "data_parallel_size": world // pipeline, "world_size": world,
    }  # fmt: skip


def shapes_of(arguments: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes by model-space name."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN)}
    for layer in range(arguments["num_layers"]):
        of_layer = _attention() | (_dense() if layer < DENSE else _experts(arguments["num_experts"]))
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes | {"decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (VOCABULARY, HIDDEN)}


def _attention() -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (HIDDEN,),
        "self_attention.linear_proj.weight": (HIDDEN, HEADS * VALUE),
        "self_attention.linear_q_down_proj.weight": (QUERY_RANK, HIDDEN),
        "self_attention.linear_q_up_proj.weight": (HEADS * (PLAIN + ROTATED), QUERY_RANK),
        "self_attention.linear_kv_down_proj.weight": (KEY_RANK + ROTATED, HIDDEN),
        "self_attention.linear_kv_up_proj.weight": (HEADS * (PLAIN + VALUE), KEY_RANK),
        "self_attention.q_layernorm.weight": (QUERY_RANK,),
        "self_attention.kv_layernorm.weight": (KEY_RANK,),
    }


def _dense() -> dict[str, tuple[int, ...]]:
    return {
        "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
        "mlp.linear_fc1.weight": (2 * FEED_FORWARD, HIDDEN),
        "mlp.linear_fc2.weight": (HIDDEN, FEED_FORWARD),
    }


def _experts(count: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"pre_mlp_layernorm.weight": (HIDDEN,), "mlp.router.weight": (count, HIDDEN)}
    for prefix in ("mlp.shared_experts", *(f"mlp.experts.experts.{number}" for number in range(count))):
        shapes[f"{prefix}.linear_fc1.weight"] = (2 * EXPERT_FEED_FORWARD, HIDDEN)
        shapes[f"{prefix}.linear_fc2.weight"] = (HIDDEN, EXPERT_FEED_FORWARD)
    return shapes
