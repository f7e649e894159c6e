"""The functions of frameworks that this package wraps, as data.

Each ``parameters`` was compared with the definition in Megatron-LM 0.7.0, 0.8.0, 0.12.1, 0.15.0, 0.16.1,
0.17.0, 0.18.0, 0.19.0 and 0.19.2. It only lists names that all of them have and that the wrapper needs.
"""

from __future__ import annotations

from mcore_ckpt_ext.patching.patch_point import PatchPoint

# Errors of Megatron Core for a checkpoint that does not fit or is damaged: its own type, and torch's, which does not
# derive from Exception (megatron/core/dist_checkpointing/validation.py and strategies/torch.py, core_v0.7.0 to 0.19.2).
_TORCH_FAILURE = "torch.distributed.checkpoint.api:CheckpointException"
_LOAD_FAILURES = ("megatron.core.dist_checkpointing.core:CheckpointingException", _TORCH_FAILURE)

# The names of each module that the wrappers read. Some have come later: `FIRST_WITH_NAME`, job/release_names.py.
_READ_BY_SAVES = (
    "get_args",
    "unwrap_model",
    "get_checkpoint_name",
    "get_checkpoint_tracker_filename",
    "megatron.training.async_utils:maybe_finalize_async_save",
)
_READ_BY_STATES = ("_load_base_checkpoint", "CheckpointType")
_READ_BY_LOADS = (
    *_READ_BY_STATES,
    "get_args",
    "unwrap_model",
    "checkpoint_exists",
    "read_metadata",
    "_get_checkpoint_format",
    "set_loaded_iteration",
    "FileSystemReader",
    "get_checkpoint_name",
    "mpu",
    "megatron.training.global_vars:_GLOBAL_TOKENIZER",
    "megatron.core.optimizer.optimizer:param_group_identifier_keys",
)
_READ_BY_QUEUES = ("_async_calls_queue", "_get_async_calls_queue", "init_persistent_async_worker")


def _patch_point(
    *locations: str,
    wrapper: str,
    parameters: tuple[str, ...] = (),
    version_module: str = "megatron.core",
    raises: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
) -> PatchPoint:
    return PatchPoint(locations, f"mcore_ckpt_ext.megatron.{wrapper}", parameters, version_module, raises, reads)


PATCH_POINTS = (
    _patch_point(
        "megatron.training.checkpointing:load_checkpoint",
        wrapper="load:wrap_load_checkpoint",
        # The first parameter was renamed from `model` to `ddp_model` between 0.8.0 and 0.12.1.
        parameters=("optimizer", "opt_param_scheduler", "load_arg", "strict"),
        raises=_LOAD_FAILURES,
        reads=_READ_BY_LOADS,
    ),
    _patch_point(
        "megatron.training.checkpointing:load_args_from_checkpoint",
        wrapper="stored_arguments:wrap_load_args",
        parameters=("args", "load_arg"),
        reads=_READ_BY_STATES,
    ),
    _patch_point(
        "megatron.training.checkpointing:save_checkpoint",
        wrapper="save:wrap_save_checkpoint",
        parameters=("iteration", "model", "optimizer", "opt_param_scheduler"),
        raises=(_TORCH_FAILURE,),
        reads=_READ_BY_SAVES,
    ),
    _patch_point(
        "megatron.training.async_utils:schedule_async_save",
        wrapper="save:wrap_schedule_async_save",
        parameters=("async_request",),
        raises=(_TORCH_FAILURE,),
        reads=_READ_BY_QUEUES,
    ),
    _patch_point(
        "megatron.training.async_utils:maybe_finalize_async_save",
        wrapper="save:wrap_maybe_finalize_async_save",
        parameters=("blocking",),
        raises=(_TORCH_FAILURE,),
        reads=_READ_BY_QUEUES,
    ),
    _patch_point(
        "megatron.core.dist_checkpointing.strategies.state_dict_saver:save_state_dict_async_finalize",
        wrapper="save:wrap_save_state_dict_async_finalize",
        parameters=("storage_writer", "global_metadata", "dist_wrapper"),
    ),
    # The same step of the strategy `nvrx`; read in 0.6.0, the first release that Megatron 0.18 and later accept.
    _patch_point(
        "nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver:save_state_dict_async_finalize",
        wrapper="save:wrap_save_state_dict_async_finalize",
        parameters=("storage_writer", "global_metadata", "dist_wrapper"),
        version_module="nvidia_resiliency_ext",
    ),
    _patch_point(
        "megatron.training.arguments:validate_args",
        wrapper="flags:wrap_validate_args",
        parameters=("args",),
    ),
    # Not validate_args: 0.16.x chooses the writer's queue between parse_args and validate_args
    # (megatron/training/initialize.py:86-92@0.16.1).
    _patch_point(
        "megatron.training.arguments:parse_args",
        wrapper="flags:wrap_parse_args",
        parameters=("extra_args_provider", "ignore_unknown_args"),
    ),
    _patch_point(
        "megatron.training.initialize:_set_random_seed",
        wrapper="random_seed:wrap_set_random_seed",
        parameters=("seed_",),
    ),
    _patch_point(
        "megatron.training.datasets.data_samplers:MegatronPretrainingRandomSampler.__iter__",
        "megatron.legacy.data.data_samplers:MegatronPretrainingRandomSampler.__iter__",  # up to 0.15; the same there
        wrapper="cyclic_sampler:wrap_iter",
        parameters=("self",),
    ),
    _patch_point(
        "megatron.training.dist_signal_handler:DistributedSignalHandler.signals_received",
        wrapper="elastic.ending:wrap_signals_received",
        parameters=("self",),
    ),
    # Every loop that loads with Megatron Core calls it; read in core_v0.12.1, 0.16.1, 0.19.0 and 0.19.2.
    _patch_point(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict",
        wrapper="core_load:wrap_sharded_state_dict",
        parameters=("self", "model_sharded_state_dict", "is_loading"),
    ),
    _patch_point(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        wrapper="core_load:wrap_load_state_dict",
        parameters=("self", "state_dict"),
    ),
    _patch_point(
        "megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict",
        wrapper="core_load:wrap_sharded_state_dict",
        parameters=("self", "model_sharded_state_dict", "is_loading"),
    ),
    _patch_point(
        "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
        wrapper="core_load:wrap_load_state_dict",
        parameters=("self", "state_dict"),
    ),
    _patch_point(
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.sharded_state_dict",
        wrapper="core_load:wrap_sharded_state_dict",
        parameters=("self", "model_sharded_state_dict", "is_loading"),
    ),
    _patch_point(
        "megatron.core.dist_checkpointing.serialization:load",
        wrapper="core_load:wrap_load",
        parameters=("sharded_state_dict", "checkpoint_dir", "sharded_strategy", "strict"),
        raises=_LOAD_FAILURES,
        reads=("load_preprocess",),
    ),
    _patch_point(
        "megatron.core.dist_checkpointing.serialization:save",
        wrapper="core_save:wrap_save",
        parameters=("sharded_state_dict", "checkpoint_dir", "sharded_strategy"),
    ),
    _patch_point(
        "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.async_loop",
        wrapper="child_processes:wrap_async_loop",
    ),
    _patch_point(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
        "megatron.core.dist_checkpointing.strategies.filesystem_async:_get_write_results_queue",  # 0.8 to 0.16
        wrapper="child_processes:wrap_results_queue",
    ),
    # 0.2.1 to 0.6.0, and the development head of 22 August 2026.
    _patch_point(
        "megatron.bridge.training.checkpointing:_load_checkpoint_from_path",
        wrapper="third_party:wrap_bridge_load",
        parameters=("load_dir", "state", "model", "optimizer"),
        reads=("DistributedOptimizer",),
        version_module="megatron.bridge",
    ),
    # 4.6.0, and the development head of 22 August 2026.
    _patch_point(
        "swift.megatron.utils.megatron_lm_utils:load_mcore_checkpoint",
        wrapper="third_party:wrap_swift_load",
        parameters=("args", "ddp_models", "optimizer", "opt_param_scheduler"),
        version_module="swift.version",
    ),
)
