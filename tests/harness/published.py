"""The `config.json` of well-known models, in the form of the release of transformers that wrote it."""

from __future__ import annotations

from typing import Any

_FILE: dict[str, Any] = {"torch_dtype": "bfloat16", "use_cache": True, "transformers_version": "4.43.1"}
_LLAMA: dict[str, Any] = {
    **_FILE, "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_LLAMA, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 131072,
    "use_sliding_window": False, "max_window_layers": 28, "vocab_size": 152064,
}  # fmt: skip
_QWEN_EXPERTS: dict[str, Any] = {
    "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "router_aux_loss_coef": 0.001, "output_router_logits": False,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **_LLAMA, "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_deepseek.D"},
    "aux_loss_alpha": 0.001, "ep_size": 1, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_layer_freq": 1,
    "n_shared_experts": 1, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6, "seq_aux": True, "v_head_dim": 128, "num_attention_heads": 128, "num_key_value_heads": 128,
    "rope_theta": 10000, "num_hidden_layers": 61,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
_DEEPSEEK_V2: dict[str, Any] = {
    **_DEEPSEEK, "model_type": "deepseek_v2", "first_k_dense_replace": 1, "moe_intermediate_size": 1536,
    "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy", "n_routed_experts": 160,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6, "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
}  # fmt: skip
_DEEPSEEK_V3: dict[str, Any] = {
    **_DEEPSEEK, "model_type": "deepseek_v3", "first_k_dense_replace": 3, "moe_intermediate_size": 2048,
    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "n_routed_experts": 256, "norm_topk_prob": True,
    "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
_KIMI: dict[str, Any] = {
    **_DEEPSEEK_V3, "model_type": "kimi_k2", "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    "rope_scaling": {**_DEEPSEEK["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
}  # fmt: skip
_LLAMA_3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
_BIASES = {"attention_bias": False, "mlp_bias": False}

PUBLISHED: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True}},
        "vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256,
    },
    "Llama 2 7B": {**_LLAMA, "pretraining_tp": 1, "rope_scaling": None, "num_key_value_heads": 32},
    "Llama 3.1 8B": {**_LLAMA, **_BIASES, "rope_scaling": _LLAMA_3, "rope_theta": 500000.0},
    "Mistral 7B 0.1": {**_LLAMA, "model_type": "mistral", "sliding_window": 4096},
    "Mixtral 8x7B": {
        **_LLAMA, "model_type": "mixtral", "attention_dropout": 0.0, "num_experts_per_tok": 2, "num_local_experts": 8,
        "output_router_logits": False, "router_aux_loss_coef": 0.02, "sliding_window": None, "rope_theta": 1000000.0,
    },
    "Qwen2.5 7B": {
        **_QWEN, "model_type": "qwen2", "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584,
    },
    "Qwen3 8B": {**_QWEN, "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "rope_scaling": None},
    "Qwen3 30B-A3B": {
        **_QWEN, **_QWEN_EXPERTS, "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
        "hidden_size": 2048, "sliding_window": None,
    },
    "Qwen1.5-MoE A2.7B": {
        **_QWEN, **_QWEN_EXPERTS, "model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4,
        "norm_topk_prob": False, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
    },
    "DeepSeek-V2": _DEEPSEEK_V2,
    "DeepSeek-V2-Lite": {
        **_DEEPSEEK_V2, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "rope_scaling": {**_DEEPSEEK["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "DeepSeek-V3": _DEEPSEEK_V3,
    "Kimi-K2": _KIMI,
    "Moonlight 16B-A3B": {**_KIMI, "model_type": "deepseek_v3", "q_lora_rank": None, "rope_scaling": None},
    "GLM-4.5-Air": {
        **_LLAMA, "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128,
        "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "norm_topk_prob": True, "n_group": 1,
        "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "use_qk_norm": False,
        "rope_scaling": None,
    },
    "MiniMax-M2": {
        **_LLAMA, "model_type": "minimax_m2", "attention_dropout": 0.0, "attn_type_list": [1] * 62, "head_dim": 128,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
        "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_experts_per_tok": 8, "num_local_experts": 256,
        "num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer", "rotary_dim": 64,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "sliding_window": None,
        "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "use_mtp": True, "use_qk_norm": True,
        "use_routing_bias": True, "rope_theta": 5000000.0, "num_hidden_layers": 62,
    },
    "OLMoE 1B-7B": {
        **_LLAMA, "model_type": "olmoe", "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "output_router_logits": False,
        "router_aux_loss_coef": 0.01, "rope_scaling": None, "num_key_value_heads": 32,
    },
    "gpt-oss-20b": {
        **_LLAMA, "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4,
        "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 16, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_local_experts": 32, "output_router_logits": False, "router_aux_loss_coef": 0.9,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                         "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    },
    "Qwen3-Next 80B-A3B": {
        **_LLAMA, **_QWEN_EXPERTS, "model_type": "qwen3_next", "attention_bias": False, "attention_dropout": 0.0,
        "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts": 512,
        "num_experts_per_tok": 10, "partial_rotary_factor": 0.25, "rope_scaling": None, "rms_norm_eps": 1e-6,
        "shared_expert_intermediate_size": 512, "use_sliding_window": False,
    },
    "Qwen3.5 397B-A17B": {
        **{key: value for key, value in _LLAMA.items() if key not in ("intermediate_size", "rope_theta")},
        "model_type": "qwen3_5_moe_text", "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "full_attention_interval": 4, "head_dim": 256,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 64, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "mlp_only_layers": [],
        "moe_intermediate_size": 1024, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "num_experts": 512, "num_experts_per_tok": 10, "rms_norm_eps": 1e-6, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 1024,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"},
    },
    "Nemotron-H 8B": {
        **_FILE, "model_type": "nemotron_h", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0,
        "hidden_size": 4096, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "initializer_range": 0.02, "intermediate_size": 21504, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64,
        "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 8192,
        "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 32,
        "num_hidden_layers": 52, "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0,
        "rescale_prenorm_residual": True, "residual_in_fp32": False, "rms_norm_eps": 1e-5, "sliding_window": None,
        "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
        "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
        "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
    },
    "DeepSeek-V3.2": {
        **_DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    },
    "GLM-5": {
        **{key: value for key, value in _DEEPSEEK_V3.items()
           if key not in ("aux_loss_alpha", "rope_scaling", "rope_theta", "quantization_config")},
        "model_type": "glm_moe_dsa", "head_dim": 64, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
        "indexer_rope_interleave": True, "kv_lora_rank": 512, "n_group": 1, "topk_group": 1, "num_attention_heads": 64,
        "num_hidden_layers": 78, "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_head_dim": 256,
        "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "rope_interleave": True, "v_head_dim": 256,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    },
    "GLM-4.7-Flash": {
        **{key: value for key, value in _DEEPSEEK_V3.items()
           if key not in ("aux_loss_alpha", "moe_layer_freq", "rope_scaling", "scoring_func", "quantization_config")},
        "model_type": "glm4_moe_lite", "first_k_dense_replace": 1, "kv_lora_rank": 512, "moe_intermediate_size": 1536,
        "n_group": 1, "topk_group": 1, "n_routed_experts": 64, "num_attention_heads": 20, "num_experts_per_tok": 4,
        "num_hidden_layers": 47, "num_key_value_heads": 20, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
        "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None,
        "routed_scaling_factor": 1.8, "v_head_dim": 256,
    },
    "InternLM3 8B": {
        **_LLAMA, "model_type": "internlm3", "attention_dropout": 0.0, "bias": False, "qkv_bias": False,
        "head_dim": 128, "num_key_value_heads": 2, "pad_token_id": 2, "rope_theta": 50000000,
        "rope_scaling": None,
    },
    "MiMo 7B": {
        **_QWEN, "model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1, "rope_theta": 640000,
        "rope_scaling": None,
    },
    "Gemma 3 27B": {
        **{key: value for key, value in _LLAMA.items() if key not in ("hidden_act", "rope_theta")},
        "model_type": "gemma3_text", "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "cache_implementation": "hybrid", "head_dim": 128, "num_key_value_heads": 16,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 168, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000.0, "sliding_window": 1024, "sliding_window_pattern": 6, "tie_word_embeddings": True,
    },
    "Gemma 2 9B": {
        **_LLAMA, "model_type": "gemma2", "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_size": 4096, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    },
    "Seed-OSS 36B": {
        **_LLAMA, "model_type": "seed_oss", "attention_bias": True, "attention_dropout": 0.1, "head_dim": 128,
        "attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.1,
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
    },
    "ERNIE-4.5 0.3B": {
        **_LLAMA, "model_type": "ernie4_5", "head_dim": 128, "rope_theta": 500000.0, "use_bias": False,
        "tie_word_embeddings": True,
    },
    "SmolLM3 3B": {
        **_LLAMA, **_BIASES, "model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 4,
        "attention_dropout": 0.0, "no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4,
        "max_window_layers": 28, "pretraining_tp": 2, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "StarCoder2 3B": {
        **{key: value for key, value in _LLAMA.items() if key != "rms_norm_eps"}, "model_type": "starcoder2",
        "attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1, "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh", "norm_type": "layer_norm", "mlp_type": "default", "use_bias": True,
        "rope_theta": 999999.4420358813, "sliding_window": 4096, "tie_word_embeddings": True,
    },
    "Phi-3-mini 4k": {
        **_LLAMA, "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "original_max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047,
        "num_key_value_heads": 32,
    },
    "AFM 4.5B": {
        **_LLAMA, **_BIASES, "model_type": "arcee", "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "relu2",
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
                         "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn"},
    },
}  # fmt: skip
