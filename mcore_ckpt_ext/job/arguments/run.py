"""Rows of the arguments of a job: its layout, its optimizer, its files, and older names of arguments.

Sources: megatron/training/arguments.py and megatron/core/transformer/transformer_config.py, core_v0.7.0 to 0.19.2.
"""

from __future__ import annotations

from mcore_ckpt_ext.job.arguments.conditions import WITH_BLOCKS, WITH_EXPERTS, WITH_PATTERN
from mcore_ckpt_ext.job.arguments.kinds import (
    ANYTHING,
    ELEMENT_COUNT,
    LAYER_COUNT,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    RANK_COUNT,
    SAMPLE_COUNT,
    SWITCH,
    TEXT,
)
from mcore_ckpt_ext.job.arguments.row import (
    CHANGES,
    NOTHING,
    ON,
    SAME,
    SHAPES,
    Alias,
    Argument,
    Flag,
    Noted,
    bridge,
    changes,
    reads,
    value,
)

_OF_HYBRIDS = "megatron.core.models.hybrid.hybrid_layer_specs"
_OF_MAMBA = "megatron.core.models.mamba.mamba_layer_specs"
HYBRID_SPECS = (
    [_OF_HYBRIDS, "hybrid_stack_spec"],
    [_OF_MAMBA, "mamba_stack_spec"],
    [_OF_HYBRIDS, "mamba_stack_spec"],
    [_OF_MAMBA, "hybrid_stack_spec"],
)
"""Megatron's own specs of hybrid models, as `--spec` takes them: since 0.18, up to 0.17, and under both names."""


class RunTable:
    """The arguments of a job that do not define its model."""

    # The parallel layout.
    tensor_model_parallel_size = Argument(RANK_COUNT.optional, NOTHING)
    pipeline_model_parallel_size = Argument(RANK_COUNT.optional, NOTHING)
    virtual_pipeline_model_parallel_size = Argument(LAYER_COUNT.optional, NOTHING)
    expert_model_parallel_size = Argument(RANK_COUNT.optional, NOTHING)
    expert_tensor_parallel_size = Argument(RANK_COUNT.optional, NOTHING, since="0.10")
    context_parallel_size = Argument(RANK_COUNT.optional, NOTHING)
    data_parallel_size = Argument(RANK_COUNT.optional, NOTHING)
    world_size = Argument(RANK_COUNT.optional, NOTHING)
    use_tp_pp_dp_mapping = Argument(SWITCH.optional, NOTHING, None, reads("dist"))

    # The layers of a pipeline stage.
    decoder_first_pipeline_num_layers = Argument(
        LAYER_COUNT.optional, NOTHING, None, reads("model.num_layers_in_first_pipeline_stage"), since="0.9"
    )
    decoder_last_pipeline_num_layers = Argument(
        LAYER_COUNT.optional, NOTHING, None, reads("model.num_layers_in_last_pipeline_stage"), since="0.9"
    )
    pipeline_model_parallel_layout = Argument(ANYTHING.optional, NOTHING, since="0.13")
    account_for_embedding_in_pipeline_split = Argument(SWITCH.optional, NOTHING, since="0.11")
    account_for_loss_in_pipeline_split = Argument(SWITCH.optional, NOTHING, since="0.11")

    # The gradient buffers and the optimizer.
    use_distributed_optimizer = Argument(SWITCH.optional, NOTHING, None, reads("ddp"))
    use_precision_aware_optimizer = Argument(SWITCH.optional, NOTHING, None, reads("optimizer"), since="0.11")
    main_params_dtype = Argument(ANYTHING.optional, NOTHING, since="0.11")
    optimizer_cpu_offload = Argument(SWITCH.optional, NOTHING, None, reads("optimizer"), since="0.12")
    num_distributed_optimizer_instances = Argument(POSITIVE.optional, NOTHING, None, reads("ddp"), since="0.10")
    overlap_grad_reduce = Argument(SWITCH.optional, NOTHING, None, reads("ddp"))
    overlap_param_gather_with_optimizer_step = Argument(SWITCH.optional, NOTHING, None, reads("optimizer"), since="0.9")
    ddp_bucket_size = Argument(ELEMENT_COUNT.optional, NOTHING, None, reads("ddp.bucket_size"))
    ddp_num_buckets = Argument(POSITIVE.optional, NOTHING, None, reads("ddp.num_buckets"), since="0.12")
    ddp_pad_buckets_for_high_nccl_busbw = Argument(
        SWITCH.optional, NOTHING, None, reads("ddp.pad_buckets_for_high_nccl_busbw"), since="0.12"
    )
    accumulate_allreduce_grads_in_fp32 = Argument(
        SWITCH.optional, NOTHING, None, reads("ddp.grad_reduce_in_fp32", "model.grad_reduce_in_fp32")
    )
    fp8_param_gather = Argument(SWITCH.optional, NOTHING, None, reads("ddp"), since="0.9")
    fp4_param_gather = Argument(SWITCH.optional, NOTHING, None, reads("ddp"), since="0.17")
    first_last_layers_bf16 = Argument(SWITCH.optional, NOTHING, since="0.12")
    num_layers_at_start_in_bf16 = Argument(LAYER_COUNT.optional, NOTHING, since="0.12")
    num_layers_at_end_in_bf16 = Argument(LAYER_COUNT.optional, NOTHING, since="0.12")
    lr = Argument(NUMBER.optional, NOTHING, None, reads("optimizer"))
    min_lr = Argument(NOT_NEGATIVE.optional, NOTHING, None, reads("optimizer"))
    decoupled_lr = Argument(NUMBER.optional, NOTHING, None, reads("optimizer"))
    decoupled_min_lr = Argument(NUMBER.optional, NOTHING, None, reads("optimizer"))

    # Saving, and the progress of the run.
    no_save_optim = Argument(SWITCH.optional, NOTHING)
    ckpt_fully_parallel_save = Argument(SWITCH.optional, NOTHING, None, reads("checkpoint.fully_parallel_save"))
    dist_ckpt_strictness = Argument(TEXT.optional, NOTHING, None, reads("checkpoint"), since="0.8")
    seq_length = Argument(POSITIVE.optional, NOTHING)
    global_batch_size = Argument(POSITIVE.optional, NOTHING, None, reads("train"))
    rampup_batch_size = Argument(ANYTHING.optional, NOTHING, None, reads("train"))
    consumed_train_samples = Argument(SAMPLE_COUNT.optional, NOTHING)
    consumed_valid_samples = Argument(SAMPLE_COUNT.optional, NOTHING)
    tokenizer_type = Argument(TEXT.optional, NOTHING, None, reads("tokenizer"))
    bf16 = Argument(SWITCH.optional, NOTHING, None, SAME)
    fp16 = Argument(SWITCH.optional, NOTHING, None, SAME)
    params_dtype = Argument(ANYTHING.optional, NOTHING)

    # The order of the data, and the sizes of batches: see `continuity.data_order`.
    micro_batch_size = Argument(POSITIVE.optional, NOTHING, None, reads("train"))
    train_iters = Argument(SAMPLE_COUNT.optional, NOTHING, None, reads("train"))
    train_samples = Argument(SAMPLE_COUNT.optional, NOTHING, None, reads("train"))
    decrease_batch_size_if_needed = Argument(SWITCH.optional, NOTHING, None, reads("train"), since="0.9")
    step_batch_size_schedule = Argument(TEXT.optional, NOTHING, since="0.18")
    dataloader_type = Argument(TEXT.optional, NOTHING, None, reads("dataset"))
    data_sharding = Argument(SWITCH.optional, NOTHING, None, reads("dataset"))
    dataloader_save = Argument(TEXT.optional, NOTHING, is_parsed=False)
    num_workers = Argument(ELEMENT_COUNT.optional, NOTHING, None, reads("dataset"))
    phase_transition_iterations = Argument(ANYTHING.optional, NOTHING, since="0.16")
    seed = Argument(ELEMENT_COUNT.optional, NOTHING)

    # Other names of arguments of the model, and the storage of its weights.
    group_query_attention = Argument(SWITCH.optional, SHAPES)
    norm_epsilon = Argument(NOT_NEGATIVE.optional, Alias("layernorm_epsilon"), until="0.16")
    apply_layernorm_1p = Argument(SWITCH.optional, Alias("layernorm_zero_centered_gamma"), until="0.16")
    use_rotary_position_embeddings = Argument(
        SWITCH.optional,
        Alias("position_embedding_type"),
        Flag("on", (WITH_BLOCKS,)),  # the parser requires it with such blocks
    )
    padded_vocab_size = Argument(ELEMENT_COUNT.optional, SHAPES)
    make_vocab_size_divisible_by = Argument(POSITIVE.optional, NOTHING, None, SAME)
    moe_grouped_gemm = Argument(SWITCH.optional, NOTHING, ON, bridge(WITH_EXPERTS))
    moe_use_legacy_grouped_gemm = Argument(SWITCH.optional, NOTHING, since="0.11", until="0.17")

    # Models that are not decoders of equal layers.
    hybrid_layer_pattern = Argument(TEXT.optional, CHANGES, value(WITH_PATTERN), since="0.17")
    is_hybrid_model = Argument(SWITCH.default(False), since="0.12")
    mamba_state_dim = Argument(ELEMENT_COUNT.default(128), changes(WITH_PATTERN), value(WITH_PATTERN), since="0.12")
    mamba_head_dim = Argument(ELEMENT_COUNT.default(64), changes(WITH_PATTERN), value(WITH_PATTERN), since="0.12")
    mamba_num_groups = Argument(ELEMENT_COUNT.default(8), changes(WITH_PATTERN), value(WITH_PATTERN), since="0.12")
    mamba_num_heads = Argument(ELEMENT_COUNT.optional, changes(WITH_PATTERN), value(WITH_PATTERN), since="0.13")
    spec = Argument(
        ANYTHING.optional,
        Noted("the job builds its layers with its own module, whose computation is unknown", HYBRID_SPECS),
    )
    hetereogenous_dist_checkpoint = Argument(SWITCH.optional, NOTHING, is_parsed=False)
    heterogeneous_layers_config_path = Argument(TEXT.optional, NOTHING, value(WITH_BLOCKS), since="0.12")
    heterogeneous_layers_config_encoded_json = Argument(TEXT.optional, CHANGES, since="0.12")
