"""Rows of the arguments that no code reads by name.

Either only one of their values is supported, or the row only describes a field of Megatron-Bridge.

Sources: as in `model.py`. Arguments of Megatron-Bridge's and NeMo's configurations are in no parser.
"""

from __future__ import annotations

from mcore_ckpt_ext.job.arguments.conditions import (
    WITH_COMPRESSION,
    WITH_EXPERTS,
    WITH_FURTHER_TOKENS,
    WITH_HYPER_CONNECTIONS,
    WITH_LATENT,
    WITH_MHC,
    WITH_MROPE,
    WITH_MUP,
    WITH_PATTERN,
    WITH_RELATIVE,
    WITH_ROPE,
    WITH_SHARED_EXPERT,
    WITH_VARIANT,
)
from mcore_ckpt_ext.job.arguments.kinds import ANYTHING
from mcore_ckpt_ext.job.arguments.row import IF_CHANGED, NOTHING, Alias, AnyBut, Argument, Noted, changes, reads, value


class OtherTable:
    """Arguments that neither `JobArguments` nor `ModelArguments` has as attributes."""

    encoder_num_layers = Argument(ANYTHING.optional, Alias("num_layers"))
    use_mup = Argument(ANYTHING.default(False), since="0.17", bridge=IF_CHANGED)
    enable_mhc_connections = Argument(ANYTHING.default(False), since="0.20")
    enable_hyper_connections = Argument(ANYTHING.default(False), is_parsed=False)
    head_wise_attn_gate = Argument(ANYTHING.default(False), is_parsed=False)
    csa_compress_ratios = Argument(ANYTHING.optional, is_parsed=False)
    activation_func = Argument(ANYTHING.optional, is_parsed=False)
    export_qk_l2_norm = Argument(ANYTHING.default(False), is_parsed=False)
    export_moe_apply_probs_on_input = Argument(ANYTHING.default(False), is_parsed=False)
    hybrid_override_pattern = Argument(ANYTHING.optional, since="0.8")
    hybrid_attention_ratio = Argument(ANYTHING.optional, since="0.8", until="0.17")
    hybrid_mlp_ratio = Argument(ANYTHING.optional, since="0.8", until="0.17")
    yaml_cfg = Argument(ANYTHING.optional)
    retro_add_retriever = Argument(ANYTHING.default(False), until="0.16")
    low_freq_factor = Argument(ANYTHING.default(1), is_parsed=False)
    high_freq_factor = Argument(ANYTHING.default(4), is_parsed=False)
    old_context_len = Argument(ANYTHING.default(8192), is_parsed=False)
    moe_expert_capacity_factor = Argument(
        ANYTHING.optional,
        Noted("the job drops tokens beyond the capacity of an expert; transformers drops none"),
        bridge=IF_CHANGED,
    )
    moe_expert_rank_capacity_factor = Argument(
        ANYTHING.optional,
        Noted("the job drops tokens beyond the capacity of a rank; transformers drops none"),
        since="0.18",
        bridge=IF_CHANGED,
    )
    moe_input_jitter_eps = Argument(
        ANYTHING.optional,
        Noted("the job's routers see noise, in evaluation as well; those of transformers do not"),
        bridge=IF_CHANGED,
    )
    rotary_base_per_layer = Argument(ANYTHING.optional, changes(WITH_ROPE), is_parsed=False)
    mrope_section = Argument(ANYTHING.optional, changes(WITH_MROPE), since="0.12", bridge=IF_CHANGED)
    mrope_interleaved = Argument(ANYTHING.default(False), changes(WITH_MROPE), is_parsed=False)
    relative_attention_num_buckets = Argument(ANYTHING.default(32), changes(WITH_RELATIVE), since="0.11")
    relative_attention_max_distance = Argument(ANYTHING.default(128), changes(WITH_RELATIVE), since="0.11")
    o_groups = Argument(ANYTHING.optional, changes(WITH_LATENT), is_parsed=False)
    o_lora_rank = Argument(ANYTHING.optional, changes(WITH_LATENT), is_parsed=False)
    moe_apply_probs_on_input = Argument(ANYTHING.default(False), changes(WITH_EXPERTS), since="0.13", bridge=IF_CHANGED)
    moe_latent_size = Argument(ANYTHING.optional, changes(WITH_EXPERTS), value(WITH_PATTERN), IF_CHANGED, since="0.16")
    moe_mlp_glu_interleave_size = Argument(ANYTHING.optional, changes(WITH_EXPERTS), since="0.18", bridge=IF_CHANGED)
    moe_router_force_load_balancing = Argument(
        ANYTHING.default(False), changes(WITH_EXPERTS), since="0.13", bridge=IF_CHANGED
    )
    moe_router_force_biased = Argument(ANYTHING.optional, changes(WITH_EXPERTS), since="0.17", bridge=IF_CHANGED)
    moe_n_hash_layers = Argument(ANYTHING.default(0), changes(WITH_EXPERTS), is_parsed=False)
    moe_router_load_balancing_type = Argument(
        ANYTHING.optional, changes(WITH_EXPERTS, neutral=AnyBut(("sinkhorn", "quantile_balancing"))), bridge=IF_CHANGED
    )
    moe_shared_expert_glu_interleave_size = Argument(
        ANYTHING.optional, changes(WITH_SHARED_EXPERT), since="0.19", bridge=IF_CHANGED
    )
    mup_width_mult = Argument(ANYTHING.default(1.0), changes(WITH_MUP), since="0.17", bridge=IF_CHANGED)
    mup_base_hidden_size = Argument(ANYTHING.optional, changes(WITH_MUP), since="0.17", bridge=IF_CHANGED)
    mup_embedding_mult = Argument(ANYTHING.default(1.0), changes(WITH_MUP), since="0.17", bridge=IF_CHANGED)
    mup_output_mult = Argument(ANYTHING.default(1.0), changes(WITH_MUP), since="0.17", bridge=IF_CHANGED)
    mup_base_head_dim = Argument(ANYTHING.optional, changes(WITH_MUP), since="0.17", bridge=IF_CHANGED)
    mup_attn_scale_power = Argument(ANYTHING.default(1.0), changes(WITH_MUP), since="0.17", bridge=IF_CHANGED)
    linear_attention_type = Argument(ANYTHING.optional, changes(WITH_VARIANT), is_parsed=False)
    csa_window_size = Argument(ANYTHING.optional, changes(WITH_COMPRESSION), is_parsed=False)
    csa_compress_rotary_base = Argument(ANYTHING.optional, changes(WITH_COMPRESSION), is_parsed=False)
    csa_dense_mode = Argument(ANYTHING.default(False), changes(WITH_COMPRESSION), is_parsed=False)
    num_residual_streams = Argument(ANYTHING.default(4), changes(WITH_HYPER_CONNECTIONS), is_parsed=False)
    mhc_num_residual_streams = Argument(ANYTHING.default(4), changes(WITH_MHC), since="0.20")
    mhc_sinkhorn_iterations = Argument(ANYTHING.default(20), changes(WITH_MHC, WITH_HYPER_CONNECTIONS), since="0.20")
    mhc_init_gating_factor = Argument(ANYTHING.default(0.01), changes(WITH_MHC, WITH_HYPER_CONNECTIONS), since="0.20")
    mtp_hybrid_override_pattern = Argument(ANYTHING.optional, changes(WITH_PATTERN), since="0.17", bridge=IF_CHANGED)
    mtp_use_repeated_layer = Argument(
        ANYTHING.default(False), changes(WITH_FURTHER_TOKENS), since="0.17", bridge=IF_CHANGED
    )
    optimizer = Argument(ANYTHING.optional, NOTHING, None, reads("optimizer"))
    ckpt_format = Argument(ANYTHING.optional, NOTHING, None, reads("checkpoint"), since="0.9")
