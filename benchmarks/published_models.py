"""Published models and training setups as Megatron's arguments and parameters: metadata alone, no tensor.

The facts are rows of a JSON file: model, GPU, layout, batch, precision, recomputation, optimizer, measured memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
_CLASSIC = re.compile(r"GPT[- ](?!OSS)|Megatron-LM CI gpt")
# Their recipes set `cross_entropy_fusion_impl` to "native" (megatron/bridge/recipes/nemotronh/h100/nemotron_3_nano.py).
_WITH_NATIVE_LOSS = ("Nemotron-3.5-Lightning 16xH100 CP2", "Nemotron-3.5-Lightning SFT")


def arguments_of(row: Row) -> dict[str, Any]:
    """Return Megatron's arguments of a row's job, on one rank."""
    model, optimizer, notes = row["model"], row["optimizer"], f"{row['notes']} {row['optimizer'].get('note')}"
    arguments = {**_sizes_of(model), **_parts_of(model)}
    is_half = str(row["precision"] or "bf16") == "fp16"
    precision = str(row["precision"] or "")
    grows = _is_bf16(optimizer.get("grad_buffer")) or _is_bf16(optimizer.get("main_grads"))
    is_aware = "precision-aware" in notes or _is_bf16(optimizer.get("moments"))
    arguments |= {
        "fp16": is_half,
        "bf16": not is_half,
        "fp8": "hybrid" if "fp8" in precision or "fp4" in precision else None,
        "fp8_recipe": _recipe_of(precision),
        "fp8_param_gather": _gathers_fp8(precision, notes),
        "accumulate_allreduce_grads_in_fp32": not grows,
        "optimizer": "muon" if optimizer.get("kind") == "muon" else "adam",
        "use_distributed_optimizer": bool(optimizer.get("distributed")),
        "use_precision_aware_optimizer": is_aware,
        "optimizer_cpu_offload": bool(optimizer.get("cpu_offload_fraction")),
        "optimizer_offload_fraction": float(optimizer.get("cpu_offload_fraction") or 0.0),
        "attention_backend": "unfused" if "no flash attention" in notes.lower() else "auto",
        **_loss_of(row, notes),
        "seq_length": row["seq_length"] or 4096,
        "micro_batch_size": row["micro_batch"] or 1,
        "global_batch_size": row["global_batch"],
        "sequence_parallel": row["sequence_parallel"] is not False,
        "transformer_impl": "transformer_engine",
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "data_parallel_size": 1,
        "expert_tensor_parallel_size": 1, "world_size": 1,
    }  # fmt: skip
    if is_aware:
        kept = {"exp_avg_dtype": "moments", "exp_avg_sq_dtype": "moments", "main_params_dtype": "main_params"}
        arguments |= {name: optimizer.get(kind) or "fp32" for name, kind in kept.items()}
    return arguments | _recomputation_of(row) | _sharding_of(optimizer) | _experts_of(row, notes)


def _loss_of(row: Row, notes: str) -> dict[str, Any]:
    """Return the implementation of the loss: as stated, or as the row's script or recipe sets it.

    ms-swift's scripts set `--cross_entropy_loss_fusion true`. Where nothing is known the loss counts as not fused,
    which needs as much as Transformer Engine's, the loss of Megatron-Bridge's benchmarks (`_benchmark_common`,
    megatron/bridge/perf_recipes/_common.py).
    """
    is_te = "TE fused cross-entropy" in notes
    is_native = row["series"] == "ms-swift" or row["name"].startswith(_WITH_NATIVE_LOSS)
    return {"cross_entropy_loss_fusion": is_te or is_native, "cross_entropy_fusion_impl": "te" if is_te else "native"}


def _recipe_of(precision: str) -> str | None:
    """Return `--fp8-recipe`; the default, if another one is not said."""
    named = {"blockwise": "blockwise", "mxfp8": "mxfp8", "nvfp4": "mxfp8", "current": "tensorwise", "cs": "tensorwise"}
    if "fp8" not in precision and "fp4" not in precision:
        return None
    return next((recipe for word, recipe in named.items() if word in precision), "delayed")


def _gathers_fp8(precision: str, notes: str) -> bool:
    """Return whether weights are stored in fp8: if it is said, else as in Megatron-Bridge's recipes.

    Source: megatron/bridge/training/mixed_precision.py: with all recipes but the blockwise one and fp4.
    """
    if "fp8 param gather" in notes:
        return "no fp8 param gather" not in notes
    return "fp8" in precision and "blockwise" not in precision


def _is_bf16(dtype: object) -> bool:
    return dtype == "bf16"


def _sizes_of(model: Row) -> dict[str, Any]:
    is_classic = bool(_CLASSIC.match(model["name"]))
    heads, groups = model["heads"], model["kv_groups"]
    return {
        "num_layers": model["layers"], "hidden_size": model["hidden"], "num_attention_heads": heads,
        "ffn_hidden_size": model["ffn_hidden"] or model["moe_ffn_hidden"] or 4 * model["hidden"],
        "kv_channels": model["head_dim"] or 128,
        "group_query_attention": groups is not None and groups != heads, "num_query_groups": groups or heads,
        "padded_vocab_size": -(-model["vocab"] // 128) * 128, "vocab_size": model["vocab"],
        "swiglu": bool(model["gated_mlp"]), "add_bias_linear": is_classic,
        "untie_embeddings_and_output_weights": not model["tied_embeddings"],
        "position_embedding_type": "learned_absolute" if is_classic else "rope",
        "qk_layernorm": model["name"].startswith("Qwen3"),
        "normalization": "LayerNorm" if is_classic else "RMSNorm",
        "hidden_dropout": 0.1 if is_classic else 0.0, "mtp_num_layers": model["mtp_layers"],
        "max_position_embeddings": 8192,
    }  # fmt: skip


def _parts_of(model: Row) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if model["experts"]:
        dense = model["first_dense_layers"] or 0
        found |= {
            "num_experts": model["experts"], "moe_router_topk": model["topk"],
            "moe_ffn_hidden_size": model["moe_ffn_hidden"],
            "moe_shared_expert_intermediate_size": model["shared_expert_ffn_hidden"],
            "moe_layer_freq": [0] * dense + [1] * (model["layers"] - dense) if dense else 1,
            "moe_grouped_gemm": True,
        }  # fmt: skip
    if latent := model["mla"]:
        found |= {
            "multi_latent_attention": True, "q_lora_rank": latent["q_lora_rank"],
            "kv_lora_rank": latent["kv_lora_rank"], "qk_head_dim": latent["qk_head_dim"],
            "qk_pos_emb_head_dim": latent["qk_rope_head_dim"], "v_head_dim": latent["v_head_dim"],
        }  # fmt: skip
    hybrid = model["hybrid"] or {}
    if every := hybrid.get("full_attention_every"):
        found |= {
            "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": every,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "attention_output_gate": True,
        }  # fmt: skip
    if pattern := hybrid.get("pattern"):
        found |= {
            "hybrid_override_pattern": pattern, "mamba_num_heads": hybrid["mamba_heads"],
            "mamba_head_dim": hybrid["mamba_head_dim"], "mamba_state_dim": hybrid.get("mamba_state") or 128,
            "mamba_num_groups": hybrid.get("mamba_groups") or 8, "is_hybrid_model": True,
        }  # fmt: skip
    if latent := hybrid.get("moe_latent"):
        found["moe_latent_size"] = latent
    return found


def _recomputation_of(row: Row) -> dict[str, Any]:
    chosen = row["recompute"] or {"granularity": "none"}
    granularity = chosen["granularity"]
    return {
        "recompute_granularity": None if granularity == "none" else granularity,
        "recompute_modules": chosen.get("modules"),
        "recompute_method": chosen.get("method"),
        "recompute_num_layers": chosen.get("num_layers"),
        "fine_grained_activation_offloading": bool(row["cpu_offload"]),
        "offload_modules": (row["cpu_offload"] or {}).get("activations"),
        "cpu_offloading_num_layers": (row["cpu_offload"] or {}).get("activation_layers"),
    }


def _sharding_of(optimizer: Row) -> dict[str, Any]:
    fsdp = str(optimizer.get("fsdp") or "")
    return {
        "use_torch_fsdp2": "torch" in fsdp,
        "use_megatron_fsdp": bool(fsdp) and "torch" not in fsdp,
        "data_parallel_sharding_strategy": "optim_grads_params",
    }


def _experts_of(row: Row, notes: str) -> dict[str, Any]:
    if not row["model"]["experts"]:
        return {}
    factor = re.search(r"capacity factor (\d+(?:\.\d+)?)( with padding)?", notes)
    return {
        "moe_expert_capacity_factor": float(factor[1]) if factor else None,
        "moe_pad_expert_input_to_capacity": bool(factor and factor[2]),
        "moe_router_force_load_balancing": bool(re.search(r"[Ff]orced (balanced )?routing|forced balanced", notes)),
    }


def low_rank_of(row: Row) -> int:
    """Return the rank of adapters of all linear layers, while the model's own weights are frozen; 0 without adapters.

    The default of ms-swift, 8, is taken if none is stated.
    """
    text = f"{row['name']} {row['optimizer'].get('note')} {row['notes']}"
    if "LoRA" not in text:
        return 0
    stated = re.search(r"rank (\d+)", text)
    return int(stated[1]) if stated else 8


def shapes_of(arguments: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the parameters of a model, by model-space name."""
    hidden, rows = arguments["hidden_size"], arguments["padded_vocab_size"]
    has_bias = arguments["add_bias_linear"]
    shapes: Shapes = {"embedding.word_embeddings.weight": (rows, hidden)}
    if arguments["position_embedding_type"] == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (arguments["max_position_embeddings"], hidden)
    for layer in range(arguments["num_layers"]):
        for name, shape in _layer(arguments, layer):
            shapes[f"decoder.layers.{layer}.{name}"] = shape
    pattern = arguments.get("hybrid_override_pattern")
    shapes["decoder.final_norm.weight" if pattern else "decoder.final_layernorm.weight"] = (hidden,)
    if has_bias:
        shapes["decoder.final_layernorm.bias"] = (hidden,)
    if arguments["untie_embeddings_and_output_weights"]:
        shapes["output_layer.weight"] = (rows, hidden)
    if arguments["mtp_num_layers"]:
        shapes |= _predicted(arguments)
    return shapes


def _layer(arguments: Mapping[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    pattern = arguments.get("hybrid_override_pattern")
    letters = pattern[layer] if pattern else _mixer(arguments, layer) + _feed_forward(arguments, layer)
    parts = {"*": _attention, "M": _mamba, "G": _linear_attention, "-": _mlp, "E": _moe}
    for letter in letters:
        yield from parts[letter](arguments).items()


def _mixer(arguments: Mapping[str, Any], layer: int) -> str:
    every = arguments.get("linear_attention_freq")
    return "G" if every and (layer + 1) % every else "*"


def _feed_forward(arguments: Mapping[str, Any], layer: int) -> str:
    if not arguments.get("num_experts"):
        return "-"
    frequency = arguments["moe_layer_freq"]
    return "E" if frequency == 1 or frequency[layer] else "-"


def _attention(arguments: Mapping[str, Any]) -> Shapes:
    hidden, heads = arguments["hidden_size"], arguments["num_attention_heads"]
    if arguments.get("multi_latent_attention"):
        return _latent(arguments)
    width = heads * arguments["kv_channels"]
    gate = 2 if arguments.get("attention_output_gate") else 1
    rows = gate * width + 2 * arguments["num_query_groups"] * arguments["kv_channels"]
    shapes: Shapes = {
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "self_attention.linear_proj.weight": (hidden, width),
        "self_attention.linear_qkv.weight": (rows, hidden),
    }
    if arguments["add_bias_linear"]:
        shapes |= {
            "self_attention.linear_qkv.layer_norm_bias": (hidden,),
            "self_attention.linear_proj.bias": (hidden,),
            "self_attention.linear_qkv.bias": (rows,),
        }
    return shapes


def _latent(arguments: Mapping[str, Any]) -> Shapes:
    hidden, heads = arguments["hidden_size"], arguments["num_attention_heads"]
    key, rotated, value = arguments["qk_head_dim"], arguments["qk_pos_emb_head_dim"], arguments["v_head_dim"]
    rank = arguments["kv_lora_rank"]
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attention.linear_proj.weight": (hidden, heads * value),
        "self_attention.linear_kv_down_proj.weight": (rank + rotated, hidden),
        "self_attention.linear_kv_up_proj.weight": (heads * (key + value), rank),
        "self_attention.linear_kv_up_proj.layer_norm_weight": (rank,),
    }
    query = heads * (key + rotated)
    if compressed := arguments["q_lora_rank"]:
        return shapes | {
            "self_attention.linear_q_down_proj.weight": (compressed, hidden),
            "self_attention.linear_q_up_proj.weight": (query, compressed),
            "self_attention.linear_q_up_proj.layer_norm_weight": (compressed,),
        }
    return shapes | {"self_attention.linear_q_proj.weight": (query, hidden)}


def _mamba(arguments: Mapping[str, Any]) -> Shapes:
    hidden, heads = arguments["hidden_size"], arguments["mamba_num_heads"]
    inner = heads * arguments["mamba_head_dim"]
    states = 2 * arguments["mamba_num_groups"] * arguments["mamba_state_dim"]
    return {
        "mixer.in_proj.layer_norm_weight": (hidden,),
        "mixer.in_proj.weight": (2 * inner + states + heads, hidden),
        "mixer.out_proj.weight": (hidden, inner),
    }


def _linear_attention(arguments: Mapping[str, Any]) -> Shapes:
    hidden = arguments["hidden_size"]
    key = arguments["linear_num_key_heads"] * arguments["linear_key_head_dim"]
    heads = arguments["linear_num_value_heads"]
    value = heads * arguments["linear_value_head_dim"]
    return {
        "self_attention.in_proj.layer_norm_weight": (hidden,),
        "self_attention.in_proj.weight": (2 * key + 2 * value + 2 * heads, hidden),
        "self_attention.out_proj.weight": (hidden, value),
    }


def _mlp(arguments: Mapping[str, Any]) -> Shapes:
    hidden, width = arguments["hidden_size"], arguments["ffn_hidden_size"]
    rows = (2 if arguments["swiglu"] else 1) * width
    shapes: Shapes = {
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
        "mlp.linear_fc1.weight": (rows, hidden),
        "mlp.linear_fc2.weight": (hidden, width),
    }
    if arguments["add_bias_linear"]:
        shapes |= {
            "mlp.linear_fc1.layer_norm_bias": (hidden,),
            "mlp.linear_fc1.bias": (rows,),
            "mlp.linear_fc2.bias": (hidden,),
        }
    return shapes


def _moe(arguments: Mapping[str, Any]) -> Shapes:
    hidden, count, width = arguments["hidden_size"], arguments["num_experts"], arguments["moe_ffn_hidden_size"]
    gates = 2 if arguments["swiglu"] else 1
    latent = arguments.get("moe_latent_size")
    taken = latent or hidden
    shapes: Shapes = {"pre_mlp_layernorm.weight": (hidden,), "mlp.router.weight": (count, hidden)}
    if latent:
        shapes |= {"mlp.fc1_latent_proj.weight": (latent, hidden), "mlp.fc2_latent_proj.weight": (hidden, latent)}
    for number in range(count):
        shapes[f"mlp.experts.experts.{number}.linear_fc1.weight"] = (gates * width, taken)
        shapes[f"mlp.experts.experts.{number}.linear_fc2.weight"] = (taken, width)
    if shared := arguments["moe_shared_expert_intermediate_size"]:
        shapes["mlp.shared_experts.linear_fc1.weight"] = (gates * shared, hidden)
        shapes["mlp.shared_experts.linear_fc2.weight"] = (hidden, shared)
    return shapes


def _predicted(arguments: Mapping[str, Any]) -> Shapes:
    """The layers for multi-token prediction; a hybrid model repeats one (`--mtp-use-repeated-layer`)."""
    hidden, last = arguments["hidden_size"], arguments["num_layers"] - 1
    is_hybrid = bool(arguments.get("hybrid_override_pattern"))
    shapes: Shapes = {}
    for depth in range(1 if is_hybrid else arguments["mtp_num_layers"]):
        prefix = f"mtp.layers.{depth}"
        shapes[f"{prefix}.eh_proj.weight"] = (hidden, 2 * hidden)
        parts = {**_attention(arguments), **_moe(arguments)} if is_hybrid else dict(_layer(arguments, last))
        inner = "mtp_model_layer.layers.0" if is_hybrid else "transformer_layer"
        shapes |= {f"{prefix}.{inner}.{name}": shape for name, shape in parts.items()}
    return shapes
