"""The functions of frameworks that this package wraps, as data.

Each ``parameters`` was compared with the definition in Megatron-LM 0.7.0, 0.8.0, 0.12.1, 0.15.0, 0.16.1,
0.17.0, 0.18.0, 0.19.0 and 0.19.2. It only lists names that all of them have and that the wrapper needs.
"""

from __future__ import annotations

from mcore_ckpt_ext.patching.registry import PatchPoint

# Errors of Megatron Core for a checkpoint that does not fit or is damaged: its own type, and torch's, which does not
# derive from Exception (megatron/core/dist_checkpointing/validation.py and strategies/torch.py, core_v0.7.0 to 0.19.2).
_FAILURE = "torch.distributed.checkpoint.api:CheckpointException"
_OF_LOADS = ("megatron.core.dist_checkpointing.core:CheckpointingException", _FAILURE)

PATCH_POINTS = (
    PatchPoint(
        module="megatron.training.checkpointing",
        attribute="load_checkpoint",
        wrapper="mcore_ckpt_ext.megatron.load:wrap_load_checkpoint",
        # The first parameter was renamed from `model` to `ddp_model` between 0.8.0 and 0.12.1.
        parameters=("optimizer", "opt_param_scheduler", "load_arg", "strict"),
        version_module="megatron.core",
        raises=_OF_LOADS,
    ),
    PatchPoint(
        module="megatron.training.checkpointing",
        attribute="load_args_from_checkpoint",
        wrapper="mcore_ckpt_ext.megatron.stored_arguments:wrap_load_args",
        parameters=("args", "load_arg"),
        version_module="megatron.core",
    ),
    PatchPoint(
        module="megatron.training.checkpointing",
        attribute="save_checkpoint",
        wrapper="mcore_ckpt_ext.megatron.save:wrap_save_checkpoint",
        parameters=("iteration", "model", "optimizer", "opt_param_scheduler"),
        version_module="megatron.core",
        raises=(_FAILURE,),
    ),
    PatchPoint(
        module="megatron.training.async_utils",
        attribute="schedule_async_save",
        wrapper="mcore_ckpt_ext.megatron.save:wrap_schedule_async_save",
        parameters=("async_request",),
        version_module="megatron.core",
        raises=(_FAILURE,),
    ),
    PatchPoint(
        module="megatron.training.async_utils",
        attribute="maybe_finalize_async_save",
        wrapper="mcore_ckpt_ext.megatron.save:wrap_maybe_finalize_async_save",
        parameters=("blocking",),
        version_module="megatron.core",
        raises=(_FAILURE,),
    ),
    PatchPoint(
        module="megatron.core.dist_checkpointing.strategies.state_dict_saver",
        attribute="save_state_dict_async_finalize",
        wrapper="mcore_ckpt_ext.megatron.save:wrap_save_state_dict_async_finalize",
        parameters=("storage_writer", "global_metadata", "dist_wrapper"),
        version_module="megatron.core",
    ),
    PatchPoint(
        # The same step of the strategy `nvrx`; read in 0.6.0, the first release that Megatron 0.18 and later accept.
        module="nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver",
        attribute="save_state_dict_async_finalize",
        wrapper="mcore_ckpt_ext.megatron.save:wrap_save_state_dict_async_finalize",
        parameters=("storage_writer", "global_metadata", "dist_wrapper"),
        version_module="nvidia_resiliency_ext",
    ),
    PatchPoint(
        module="megatron.training.arguments",
        attribute="validate_args",
        wrapper="mcore_ckpt_ext.megatron.flags:wrap_validate_args",
        parameters=("args",),
        version_module="megatron.core",
    ),
    PatchPoint(
        module="megatron.training.arguments",
        # Not validate_args: 0.16.x chooses the writer's queue between parse_args and validate_args
        # (megatron/training/initialize.py:86-92@0.16.1).
        attribute="parse_args",
        wrapper="mcore_ckpt_ext.megatron.flags:wrap_parse_args",
        parameters=("extra_args_provider", "ignore_unknown_args"),
        version_module="megatron.core",
    ),
    PatchPoint(
        # Every loop that loads with Megatron Core calls it; read in core_v0.12.1, 0.16.1, 0.19.0 and 0.19.2.
        module="megatron.core.optimizer.distrib_optimizer",
        attribute="DistributedOptimizer.sharded_state_dict",
        wrapper="mcore_ckpt_ext.megatron.core_load:wrap_sharded_state_dict",
        parameters=("self", "model_sharded_state_dict", "is_loading"),
        version_module="megatron.core",
    ),
    PatchPoint(
        module="megatron.core.optimizer.distrib_optimizer",
        attribute="DistributedOptimizer.load_state_dict",
        wrapper="mcore_ckpt_ext.megatron.core_load:wrap_load_state_dict",
        parameters=("self", "state_dict"),
        version_module="megatron.core",
    ),
    PatchPoint(
        module="megatron.core.optimizer.optimizer",
        attribute="ChainedOptimizer.sharded_state_dict",
        wrapper="mcore_ckpt_ext.megatron.core_load:wrap_sharded_state_dict",
        parameters=("self", "model_sharded_state_dict", "is_loading"),
        version_module="megatron.core",
    ),
    PatchPoint(
        module="megatron.core.optimizer.optimizer",
        attribute="ChainedOptimizer.load_state_dict",
        wrapper="mcore_ckpt_ext.megatron.core_load:wrap_load_state_dict",
        parameters=("self", "state_dict"),
        version_module="megatron.core",
    ),
    PatchPoint(
        module="megatron.core.dist_checkpointing.serialization",
        attribute="load",
        wrapper="mcore_ckpt_ext.megatron.core_load:wrap_load",
        parameters=("sharded_state_dict", "checkpoint_dir", "sharded_strategy", "strict"),
        version_module="megatron.core",
        raises=_OF_LOADS,
    ),
    PatchPoint(
        module="megatron.core.dist_checkpointing.serialization",
        attribute="save",
        wrapper="mcore_ckpt_ext.megatron.core_save:wrap_save",
        parameters=("sharded_state_dict", "checkpoint_dir", "sharded_strategy"),
        version_module="megatron.core",
    ),
    PatchPoint(
        module="megatron.core.dist_checkpointing.strategies.async_utils",
        attribute="PersistentAsyncCaller.async_loop",
        wrapper="mcore_ckpt_ext.megatron.child_processes:wrap_async_loop",
        version_module="megatron.core",
    ),
    PatchPoint(
        module="megatron.core.dist_checkpointing.strategies.filesystem_async",
        attribute="get_write_results_queue",
        wrapper="mcore_ckpt_ext.megatron.child_processes:wrap_results_queue",
        version_module="megatron.core",
    ),
    PatchPoint(
        # 0.2.1 to 0.6.0, and the development head of 22 August 2026.
        module="megatron.bridge.training.checkpointing",
        attribute="_load_checkpoint_from_path",
        wrapper="mcore_ckpt_ext.megatron.third_party:wrap_bridge_load",
        parameters=("load_dir", "state", "model", "optimizer"),
        version_module="megatron.bridge",
    ),
    PatchPoint(
        # 4.6.0, and the development head of 22 August 2026.
        module="swift.megatron.utils.megatron_lm_utils",
        attribute="load_mcore_checkpoint",
        wrapper="mcore_ckpt_ext.megatron.third_party:wrap_swift_load",
        parameters=("args", "ddp_models", "optimizer", "opt_param_scheduler"),
        version_module="swift.version",
    ),
)
