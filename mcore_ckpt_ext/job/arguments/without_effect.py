"""Arguments that no code reads and that do not change a trained model's forward pass.

They are listed by name or prefix. They concern devices, speed, precision, data, the loss, and the initialization or
storage of weights, or they belong to other models than GPT. They need no row of the table. Sources: as in `model.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from mcore_ckpt_ext.job.arguments.row import NOTHING
from mcore_ckpt_ext.job.arguments.table import ROWS

_BEGINNINGS = (
    # Checkpoints, runs, logs, profiles.
    "app_tag_",
    "async_",
    "ckpt_",
    "dist_ckpt_",
    "dump_",
    "error_injection_",
    "exit_",
    "flight_recorder_",
    "ft_",
    "inprocess_",
    "load_",
    "log_",
    "moe_routing_trace_",
    "non_persistent_",
    "one_logger_",
    "otel_",
    "profile_",
    "pytorch_profiler_",
    "replication_",
    "rerun_",
    "save_",
    "straggler_",
    "tensorboard_",
    "timing_log_",
    "wandb_",
    # The optimizer and its schedule.
    "adam_",
    "exp_avg_",
    "lion_",
    "loss_scale",
    "lr_",
    "muon_",
    "optimizer_",
    "sgd_",
    "weight_decay",
    # Data, tokens, losses.
    "data_",
    "dataloader_",
    "eval_",
    "fim_",
    "grpo_",
    "langrl_",
    "logits_",
    "rl_",
    "sft_",
    "tiktoken_",
    "tokenizer_",
    # Ranks, kernels, precision of the arithmetic.
    "cpu_offloading_",
    "cuda_graph_",
    "ddp_",
    "distributed_",
    "flash_",
    "fp4_",
    "fp8_",
    "fsdp_",
    "kitchen_",
    "megatron_fsdp_",
    "moe_deepep_",
    "moe_flex_",
    "moe_hybridep_",
    "moe_ncclep_",
    "moe_paged_stash",
    "recompute_",
    "tp_comm_",
    # Inference and generation; arguments of ModelOpt's scripts, except those in `other.py`.
    "export_default_",
    "export_draft_",
    "export_eagle_",
    "export_force_",
    "export_freeze_",
    "export_kd_",
    "export_kv_",
    "export_legacy_",
    "export_model_",
    "export_num_",
    "export_offline_",
    "export_quant_",
    "export_real_",
    "export_te_",
    "inference_",
    # Values that Megatron itself adds.
    "_",
    # Other models of the repository.
    "biencoder_",
    "dino_",
    "retriever_",
    "retro_encoder_",
    "retro_num_",
    "vision_",
)
_TEXT = """
# The layers: parallelism, kernels, initialization, what only training sees.
    tensor_parallel_num_weight_shards pipeline_model_parallel_comm_backend sequence_parallel
    hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel
    expert_tensor_parallel_num_weight_shards perform_initialization use_cpu_initialization deterministic_mode
    cross_entropy_loss_fusion cross_entropy_fusion_impl overlap_moe_expert_parallel_comm delay_wgrad_compute
    overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release use_ring_exchange_p2p
    defer_embedding_wgrad_compute wgrad_deferral_limit overlap_p2p_comm_warmup_flush
    microbatch_group_size_per_vp_stage mtp_standalone mtp_loss_scaling_factor mtp_detach_heads
    attention_backend fp32_residual_connection qk_clip qk_clip_alpha qk_clip_threshold
    calculate_per_token_loss dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend
    embedding_init_method_std init_model_with_meta_device apply_query_key_layer_scaling
    disable_bf16_reduced_precision_matmul use_fused_weighted_squared_relu fused_residual_rmsnorm
    use_transformer_engine_op_fuser distribute_saved_activations fp8 use_kitchen_attention fp4
    high_priority_a2a_comm_stream moe_shared_expert_overlap use_grouped_gemm_for_shared_expert
    moe_enable_routing_replay moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_dtype
    moe_router_bias_update_rate moe_router_quantile_balancing_ema use_grouped_gemm_for_dense_mlp
    moe_single_grouped_weight moe_single_grouped_bias moe_z_loss_coeff moe_token_dispatcher_type
    moe_enable_deepep moe_permute_fusion_into_hybridep moe_per_layer_logging moe_pad_expert_input_to_capacity
    moe_pad_experts_for_cuda_graph_inference moe_token_drop_policy moe_layer_recompute moe_permute_fusion
    moe_router_fusion enable_cuda_graph external_cuda_graph clone_scatter_output_in_embedding
    config_logger_dir batch_invariant_mode use_te_activation_func symmetric_ar_type
    nccl_all_reduce_for_prefill use_mamba_mem_eff_path mlp_chunks_for_prefill mlp_chunks_for_training
    fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
    delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks activation_offload_fraction
    fine_grained_offloading_max_inflight_offloads
# Training.
    empty_unused_memory_level
    check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval train_sync_interval
    manual_gc manual_gc_interval manual_gc_eval iterations_to_skip batch_size check_for_nan_in_loss_and_grad
    check_for_large_grads result_rejected_tracker_filename checkpoint_activations masked_softmax_fusion
    bias_swiglu_fusion bias_dropout_fusion apply_rope_fusion use_flash_attn
    use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params
    no_persist_layer_norm gradient_accumulation_fusion deprecated_use_mcore_models
# Checkpointing.
    save load finetune pretrained_checkpoint use_checkpoint_args use_mp_args_from_checkpoint_args
    use_tokenizer_model_from_checkpoint_args auto_detect_ckpt_format use_persistent_ckpt_worker
    strict_fsdp_dtensor_load distrib_optim_fully_reshardable_mem_efficient replication verify_integrity
    stream_ckpt_dequant no_save_rng no_load_optim no_load_rng override_ckpt_iteration use_dist_ckpt_deprecated
# Distributed init.
    align_grad_reduce local_rank lazy_mpu_init use_megatron_fsdp use_torch_fsdp2 nccl_communicator_config_path
    use_gloo_process_groups use_sharp sharp_enabled_group high_priority_stream_groups disable_jit_fuser
    model_parallel_size num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    overlap_p2p_comm overlap_param_gather align_param_gather use_layer_wise_param_layout nccl_ub
    disable_symmetric_registration create_all_gather_group outer_dp_sharding_strategy
    gradient_reduce_div_fusion suggested_communication_unit_size keep_fp8_transpose_cache
    enable_full_sharding_in_hsdp torch_fsdp2_reshard_after_forward cp_comm_type fake_process_group
# Data and dataloader.
    split train_data_path valid_data_path test_data_path per_split_data_args_path
    per_dataset_sequences_path mmap_bin_files mock_data encoder_seq_length decoder_seq_length sample_rate
    mask_prob short_seq_prob reset_position_ids reset_attention_mask eod_mask_loss
    create_attention_mask_in_dataloader num_dataset_builder_threads object_storage_cache_path
    mid_level_dataset_surplus allow_ambiguous_pad_tokens
# Of small groups.
    decoder_num_layers add_position_embedding onnx_safe bert_binary_head apply_wd_to_qk_layernorm clip_grad
    no_weight_decay_cond_type profile use_pytorch_profiler record_memory_history memory_snapshot_path
    record_shapes nvtx_ranges perform_rl_step refit_method te_rng_tracker init_method_xavier_uniform
    override_opt_param_scheduler use_checkpoint_opt_param_scheduler start_weight_decay end_weight_decay warmup
    freeze_all_layers grad_reduce_in_bf16 initial_loss_scale min_loss_scale hysteresis
    attention_softmax_in_fp32 fp16_lm_cross_entropy reuse_grad_buf_for_mxfp8_param_ag
    mamba_training_ssm_states_dtype start_eval_at_iter skip_train test_mode full_validation
    multiple_validation_sets validation_set_names pad_vocab_size vocab_file merge_file vocab_extra_ids
    metadata_path special_tokens trust_remote_code null_tokenizer_eod_id null_tokenizer_pad_id chat_template
    adlr_autoresume adlr_autoresume_interval ict_head_size ict_load bert_load titles_data_path
    query_in_block_prob use_one_sent_docs evidence_data_path block_data_path embedding_path indexer_batch_size
    indexer_log_interval num_classes img_h img_w num_channels patch_dim classes_fraction head_lr_mult
    swin_backbone_type mask_type mask_factor iter_per_epoch moe_use_upcycling moe_upcycling_granularity
    cache_mla_latents mla_down_proj_fusion barrier_with_L1_time logging_level disable_straggler_on_startup
    run_workload_inspector_server max_tokens_to_oom output_bert_embeddings bert_embedder_type
    use_legacy_static_engine decode_only_cuda_graphs enable_chunked_prefill num_speculative_tokens
    offset_sampling_seed_by_dp_rank mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
    te_precision_config_file enable_experimental main_grads_dtype enable_one_logger enable_ft_package
    calc_ft_timeouts check_for_spiky_loss enable_msc disable_msc_deprecated sft fault_injector_ranks
    fault_injector_num_ranks fault_injector_fault_types fault_injector_fault_probabilities
    fault_injector_fault_delay fault_injector_delay_start_iteration fault_injector_mtti_seconds
    fault_injector_offset_seconds fault_injector_seed
# Of other releases than 0.19.2.
    actual_vocab_size apply_dsa_kernel_fusion chunked_optimizer_state_offload cp_partition_mode
    default_dynamic_cp dense_grouped_gemm disable_chunked_prefill disable_grad_buffers_cpu_backup
    disable_param_buffers_cpu_backup dp_balanced dynamic_context_parallel enable_gloo_process_groups
    encoder_pipeline_model_parallel_size encoder_tensor_model_parallel_size fallback_to_eager_attn
    gdn_conv_pad_alignment gdn_pre_gated_delta_rule_fusion keep_fp8_transpose_cache_when_using_custom_fsdp
    legacy_tokenizer linear_cp_mode mhc_recompute_layer_num min_dynamic_context_parallel_size moe_extended_tp
    offload_optimizer_states pad_packed_seq_alignment pipeline_model_parallel_split_rank s3_cache_path
    scatter_gather_tensors_in_pipeline sequence_packing_scheduler thd_max_packed_sequences
    thd_tail_padding_policy use_custom_fsdp use_fused_mhc use_legacy_models retro_attention_gate
    retro_cyclic_train_iters retro_project_dir retro_verify_neighbor_count use_varlen_dataset
    varlen_mock_dataset_config_json varlen_sbhd_validation
# Of the development head of August 2026.
    batch_invariant_backend gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute gtp_expert_remat_nccl_ub
    gtp_remat_nccl_ub gtp_remat_opt_in_modules gtp_remat_reduce_scatter_with_fp32_accumulation logit_dtype
    moe_combine_bwd_dtype moe_dispatch_fwd_dtype moe_use_grouped_tensor mtp_hsm use_gigatoken
# Arguments that Megatron-Bridge's model providers add: padding of the vocabulary, and tokens for images
# (gpt_provider.py, and those of vision-language models, 0.2.1 to 0.6.2).
    should_pad_vocab image_token_id video_token_id vision_start_token_id vision_end_token_id vision_token_id
    image_token_index bos_token_id eos_token_id
# Arguments that Megatron itself adds, or its scripts, or that only its configurations have.
    batch_p2p_comm batch_p2p_sync curr_iteration deallocate_pipeline_outputs delay_grad_reduce do_test
    do_train do_valid expert_gtp_weight_remat_size finetune_data_split gdp_num_householder
    gtp_weight_remat_size iteration model_type parallel_output rank scatter_embedding_sequence_parallel
    skipped_train_samples transformer_pipeline_model_parallel_size use_dist_ckpt
    use_layer_wise_distributed_optimizer use_mcore_models
"""
_WITHOUT_ROW = (word for line in _TEXT.splitlines() if not line.startswith("#") for word in line.split())
_NAMES = frozenset((*_WITHOUT_ROW, *(name for name, row in ROWS.items() if row.effect is NOTHING)))


def arguments_without_effect(names: Iterable[str]) -> set[str]:
    """Return the arguments that have no effect on the forward pass."""
    return {name for name in names if name in _NAMES or name.startswith(_BEGINNINGS)}
