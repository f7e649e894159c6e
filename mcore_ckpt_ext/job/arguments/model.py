"""Rows of the arguments that define a model; a complete model has a value for each.

Sources: megatron/training/arguments.py, argument_utils.py, gpt_builders.py, and in megatron/core transformer_config.py,
gpt_model.py, attention.py, mlp.py, router.py, moe_utils.py, experts.py; core_v0.7.0 to 0.19.2, and the development head
of 22 August 2026.
"""

from __future__ import annotations

from mcore_ckpt_ext.job.arguments.conditions import (
    WITH_DELTA_NET,
    WITH_EXPERTS,
    WITH_GELU,
    WITH_INDEXED,
    WITH_LATENT,
    WITH_LINEAR,
    WITH_PATTERN,
    WITH_ROPE,
    WITH_ROPE_SCALING,
    WITH_SHARED_EXPERT,
    WITH_SOFTMAX,
    WITH_SPARSE,
    WITH_VARIANT,
    WITH_WINDOW,
    WITH_YARN,
    WITHOUT_SWIGLU,
)
from mcore_ckpt_ext.job.arguments.kinds import (
    ABOVE_ZERO,
    COUNT,
    ELEMENT_COUNT,
    FREQUENCY,
    LAYER_COUNT,
    NOT_NEGATIVE,
    NUMBER,
    NUMBERS,
    PAIR,
    POSITIVE,
    SWITCH,
    TEXT,
)
from mcore_ckpt_ext.job.arguments.row import (
    CHANGES,
    IF_CHANGED,
    NOTHING,
    ON,
    SAME,
    SHAPES,
    VALUE,
    Argument,
    BridgeField,
    Changes,
    Flag,
    bridge,
    changes,
    off,
    switch,
    value,
)

# The effect, the flag and Megatron-Bridge's field of most arguments of a part of the model.
_EXPERTS = (changes(WITH_EXPERTS), value(WITH_EXPERTS), bridge(WITH_EXPERTS))
_INDEXER = (changes(WITH_VARIANT), value(WITH_INDEXED), bridge(WITH_SPARSE))
_LINEAR = (changes(WITH_VARIANT), value(WITH_LINEAR), bridge(WITH_DELTA_NET))
_LATENT = (changes(WITH_LATENT), value(WITH_LATENT), bridge(WITH_LATENT))
_YARN = (changes(WITH_YARN, neutral=None), value(WITH_YARN), bridge(WITH_YARN))


def _yarn_names(field: str) -> tuple[Changes, Flag, tuple[BridgeField, ...]]:
    """Return them for an argument of YaRN; without latent attention its field is `field`."""
    fields = bridge(WITH_LATENT) + bridge(WITH_YARN, name=field)
    return changes(WITH_YARN, WITH_LATENT), value(WITH_LATENT, WITH_YARN), fields


class ModelTable:
    """The arguments that define a model."""

    # Sizes.
    num_layers = Argument(LAYER_COUNT.required, SHAPES, value(unless=WITH_PATTERN), SAME)
    mtp_num_layers = Argument(LAYER_COUNT.optional, SHAPES, VALUE, SAME, since="0.12")
    hidden_size = Argument(POSITIVE.required, SHAPES, VALUE, SAME)
    ffn_hidden_size = Argument(ELEMENT_COUNT.required, SHAPES, VALUE, SAME)
    num_attention_heads = Argument(COUNT.required, SHAPES, VALUE, SAME)
    num_query_groups = Argument(COUNT.required, SHAPES, None, SAME)
    kv_channels = Argument(ELEMENT_COUNT.required, SHAPES, value(unless=WITH_LATENT), SAME)
    max_position_embeddings = Argument(ELEMENT_COUNT.optional, SHAPES, VALUE)
    vocab_size = Argument(ELEMENT_COUNT.optional, SHAPES, None, SAME)

    # Implementation and embeddings.
    transformer_impl = Argument(TEXT.default("transformer_engine"), NOTHING)
    untie_embeddings_and_output_weights = Argument(SWITCH.default(False), SHAPES, ON)
    scaled_embeddings = Argument(SWITCH.default(False), is_parsed=False)
    final_logit_softcap = Argument(NUMBER.optional, is_parsed=False)

    # Positions.
    position_embedding_type = Argument(TEXT.default("learned_absolute"), CHANGES, VALUE, SAME)
    rotary_base = Argument(ABOVE_ZERO.default(10000), changes(WITH_ROPE, WITH_YARN), VALUE, SAME, since="0.8")
    rotary_base_local = Argument(ABOVE_ZERO.optional, is_parsed=False)
    rotary_percent = Argument(NOT_NEGATIVE.default(1.0), changes(WITH_ROPE, WITH_YARN), VALUE, SAME)
    rotary_interleaved = Argument(SWITCH.default(False), changes(WITH_ROPE, WITH_YARN), ON, SAME)
    use_rope_scaling = Argument(
        SWITCH.default(False), changes(WITH_ROPE), ON, bridge(name="rope_scaling"), since="0.10"
    )
    rope_scaling_factor = Argument(ABOVE_ZERO.default(8.0), changes(WITH_ROPE_SCALING), VALUE, SAME, since="0.11")
    rotary_seq_len_interpolation_factor = Argument(
        ABOVE_ZERO.optional, changes(WITH_ROPE), VALUE, bridge(name="seq_len_interpolation_factor")
    )

    # Norms, biases, initialization, dropout.
    normalization = Argument(TEXT.default("LayerNorm"), CHANGES, VALUE, SAME)
    layernorm_epsilon = Argument(
        NOT_NEGATIVE.default(1e-05), SHAPES, value(without=None, spelled="--norm-epsilon"), SAME, since="0.16"
    )
    layernorm_zero_centered_gamma = Argument(
        SWITCH.default(False), CHANGES, switch(spelled="--apply-layernorm-1p"), SAME, since="0.16"
    )
    apply_residual_connection_post_layernorm = Argument(SWITCH.default(False), CHANGES, None, IF_CHANGED)
    add_bias_linear = Argument(SWITCH.default(True), CHANGES, off("--disable-bias-linear"), SAME)
    init_method_std = Argument(NOT_NEGATIVE.default(0.02), NOTHING, VALUE, SAME)
    attention_dropout = Argument(NUMBER.default(0.1), NOTHING, VALUE, SAME)
    hidden_dropout = Argument(NUMBER.default(0.1), NOTHING, VALUE, SAME)

    # Attention.
    add_qkv_bias = Argument(SWITCH.default(False), CHANGES, ON, SAME)
    qk_layernorm = Argument(SWITCH.default(False), CHANGES, ON, SAME)
    qk_l2_norm = Argument(SWITCH.default(False), CHANGES, None, IF_CHANGED, since="0.13")
    attention_output_gate = Argument(SWITCH.default(False), CHANGES, ON, bridge(WITH_DELTA_NET), since="0.16")
    attention_softcap = Argument(NUMBER.optional, is_parsed=False)
    window_size = Argument(PAIR.optional, CHANGES, VALUE, SAME, since="0.15")
    window_attn_skip_freq = Argument(FREQUENCY.optional, changes(WITH_WINDOW), VALUE, SAME, since="0.15")
    no_rope_freq = Argument(FREQUENCY.optional, CHANGES, VALUE, SAME, since="0.13")
    softmax_type = Argument(TEXT.default("vanilla"), CHANGES, VALUE, SAME, since="0.15")
    softmax_scale = Argument(NUMBER.optional, CHANGES, None, IF_CHANGED, is_parsed=False)

    # The MLP.
    swiglu = Argument(SWITCH.default(False), CHANGES, ON)
    squared_relu = Argument(SWITCH.default(False), CHANGES, ON)
    quick_geglu = Argument(SWITCH.default(False), CHANGES, ON, since="0.15")
    openai_gelu = Argument(SWITCH.default(False), NOTHING)
    gated_linear_unit = Argument(SWITCH.default(False), is_parsed=False)
    glu_linear_offset = Argument(NUMBER.default(0.0), CHANGES, VALUE, SAME, since="0.15")
    activation_func_clamp_value = Argument(NUMBER.optional, CHANGES, VALUE, SAME, since="0.15")
    bias_gelu_fusion = Argument(SWITCH.default(True), changes(WITH_GELU), off("--no-bias-gelu-fusion", WITHOUT_SWIGLU))

    # Experts.
    num_experts = Argument(COUNT.optional, CHANGES, value(WITH_EXPERTS), bridge(name="num_moe_experts"))
    moe_ffn_hidden_size = Argument(
        ELEMENT_COUNT.required,
        changes(WITH_EXPERTS, neutral=None),
        value(WITH_EXPERTS),
        bridge(WITH_EXPERTS),
        since="0.10",
    )
    moe_router_topk = Argument(COUNT.default(2), *_EXPERTS)
    moe_layer_freq = Argument(FREQUENCY.default(1), *_EXPERTS, since="0.10")
    moe_router_pre_softmax = Argument(
        SWITCH.default(False), changes(WITH_SOFTMAX), ON, bridge(WITH_EXPERTS), since="0.8"
    )
    moe_router_score_function = Argument(TEXT.default("softmax"), *_EXPERTS, since="0.11")
    moe_router_enable_expert_bias = Argument(
        SWITCH.default(False), changes(WITH_EXPERTS), ON, bridge(WITH_EXPERTS), since="0.11"
    )
    moe_router_topk_scaling_factor = Argument(NUMBER.optional, *_EXPERTS, since="0.11")
    moe_router_num_groups = Argument(COUNT.optional, *_EXPERTS, since="0.11")
    moe_router_group_topk = Argument(COUNT.optional, *_EXPERTS, since="0.11")
    moe_shared_expert_intermediate_size = Argument(ELEMENT_COUNT.optional, *_EXPERTS, since="0.10")
    moe_shared_expert_gate = Argument(
        SWITCH.default(False), changes(WITH_SHARED_EXPERT), ON, bridge(WITH_EXPERTS), since="0.16"
    )
    moe_aux_loss_coeff = Argument(NUMBERS.default(0.0), NOTHING, value(WITH_EXPERTS), bridge(WITH_EXPERTS))

    # Variants of attention.
    experimental_attention_variant = Argument(
        TEXT.optional, CHANGES, value(WITH_INDEXED, WITH_LINEAR), bridge(WITH_DELTA_NET, WITH_SPARSE), since="0.16"
    )
    dsa_indexer_n_heads = Argument(COUNT.optional, *_INDEXER, since="0.16")
    dsa_indexer_head_dim = Argument(ELEMENT_COUNT.optional, *_INDEXER, since="0.16")
    dsa_indexer_topk = Argument(ELEMENT_COUNT.optional, *_INDEXER, since="0.16")
    dsa_indexer_topk_freq = Argument(LAYER_COUNT.default(1), *_INDEXER, since="0.19")
    dsa_indexer_skip_topk_offset = Argument(LAYER_COUNT.default(0), *_INDEXER, since="0.19")
    dsa_indexer_rope_interleaved = Argument(
        SWITCH.default(False), changes(WITH_VARIANT), ON, bridge(WITH_SPARSE), since="0.19"
    )
    dsa_indexer_rotate_activation = Argument(
        SWITCH.default(True),
        changes(WITH_VARIANT),
        off("--no-dsa-indexer-rotate-activation", WITH_INDEXED),
        bridge(WITH_SPARSE),
        since="0.19",
    )
    dsa_indexer_scoring_relu = Argument(
        SWITCH.default(True), changes(WITH_VARIANT), None, bridge(WITH_SPARSE), since="0.19"
    )
    dsa_indexer_k_norm_epsilon = Argument(NOT_NEGATIVE.optional, *_INDEXER, since="0.19")
    dsa_indexer_k_norm_fp32 = Argument(
        SWITCH.default(False), changes(WITH_VARIANT), None, bridge(WITH_SPARSE), since="0.19"
    )
    linear_attention_freq = Argument(FREQUENCY.optional, *_LINEAR, since="0.16")
    linear_conv_kernel_dim = Argument(ELEMENT_COUNT.default(4), *_LINEAR, since="0.16")
    linear_key_head_dim = Argument(ELEMENT_COUNT.default(128), *_LINEAR, since="0.16")
    linear_value_head_dim = Argument(ELEMENT_COUNT.default(128), *_LINEAR, since="0.16")
    linear_num_key_heads = Argument(COUNT.default(16), *_LINEAR, since="0.16")
    linear_num_value_heads = Argument(COUNT.default(32), *_LINEAR, since="0.16")

    # Latent attention.
    multi_latent_attention = Argument(SWITCH.default(False), CHANGES, ON, bridge(WITH_LATENT), since="0.10")
    q_lora_rank = Argument(ELEMENT_COUNT.optional, *_LATENT, since="0.10")
    kv_lora_rank = Argument(ELEMENT_COUNT.default(32), *_LATENT, since="0.10")
    qk_head_dim = Argument(ELEMENT_COUNT.default(128), *_LATENT, since="0.10")
    qk_pos_emb_head_dim = Argument(ELEMENT_COUNT.default(64), *_LATENT, since="0.10")
    v_head_dim = Argument(ELEMENT_COUNT.default(128), *_LATENT, since="0.10")
    rope_type = Argument(TEXT.optional, *_LATENT, since="0.14")
    beta_fast = Argument(ABOVE_ZERO.default(32), changes(WITH_LATENT), None, bridge(WITH_LATENT), is_parsed=False)
    beta_slow = Argument(ABOVE_ZERO.default(1), changes(WITH_LATENT), None, bridge(WITH_LATENT), is_parsed=False)
    original_max_position_embeddings = Argument(
        ELEMENT_COUNT.default(4096), changes(WITH_LATENT), None, bridge(WITH_LATENT), is_parsed=False
    )

    # Positions scaled by YaRN, with and without latent attention.
    rotary_scaling_factor = Argument(ABOVE_ZERO.default(1.0), *_yarn_names("yarn_rotary_scaling_factor"), since="0.10")
    mscale = Argument(NUMBER.default(1.0), *_yarn_names("yarn_mscale"), since="0.11")
    mscale_all_dim = Argument(NUMBER.default(0.0), *_yarn_names("yarn_mscale_all_dim"), since="0.11")
    yarn_original_max_position_embeddings = Argument(
        ELEMENT_COUNT.default(4096),
        changes(WITH_YARN, neutral=None),
        value(WITH_YARN, without=None),
        bridge(WITH_YARN),
        since="0.19",
    )
    yarn_beta_fast = Argument(ABOVE_ZERO.default(32.0), *_YARN, since="0.19")
    yarn_beta_slow = Argument(ABOVE_ZERO.default(1.0), *_YARN, since="0.19")
    yarn_correction_range_round_to_int = Argument(
        SWITCH.default(True),
        changes(WITH_YARN, neutral=None),
        off("--no-yarn-correction-range-round-to-int", WITH_YARN),
        bridge(WITH_YARN),
        since="0.19",
    )
