"""Conditions on the parts of a model on which other arguments depend."""

from __future__ import annotations

from mcore_ckpt_ext.job.arguments.row import Condition, Without

WITH_EXPERTS = Condition("num_experts")
WITH_SHARED_EXPERT = Condition("moe_shared_expert_intermediate_size")
WITH_SOFTMAX = Condition("moe_router_score_function", "softmax")
WITHOUT_SWIGLU = Condition("swiglu", False)
WITH_GELU = Without(("swiglu", "squared_relu"))
WITH_ROPE = Condition("position_embedding_type", "rope")
WITH_YARN = Condition("position_embedding_type", "yarn")
WITH_MROPE = Condition("position_embedding_type", "mrope")
WITH_RELATIVE = Condition("position_embedding_type", "relative")
WITH_ROPE_SCALING = Condition("use_rope_scaling", True)
WITH_WINDOW = Condition("window_size")
WITH_LATENT = Condition("multi_latent_attention", True)
WITH_VARIANT = Condition("experimental_attention_variant")
WITH_DELTA_NET = Condition("experimental_attention_variant", "gated_delta_net")
WITH_SPARSE = Condition("experimental_attention_variant", "dsa")
WITH_LINEAR = Condition("linear_attention_freq")
WITH_INDEXED = Condition("dsa_indexer_topk")
WITH_COMPRESSION = Condition("csa_compress_ratios")
WITH_PATTERN = Condition("hybrid_layer_pattern")
WITH_BLOCKS = Condition("heterogeneous_layers_config_encoded_json")
WITH_FURTHER_TOKENS = Condition("mtp_num_layers")
WITH_MUP = Condition("use_mup", True)
WITH_MHC = Condition("enable_mhc_connections", True)
WITH_HYPER_CONNECTIONS = Condition("enable_hyper_connections", True)
