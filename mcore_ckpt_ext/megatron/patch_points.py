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


def _patch_point(
    function: str, wrapper: str, *parameters: str, version_module: str = "megatron.core", raises: tuple[str, ...] = ()
) -> PatchPoint:
    module, attribute = function.split(":")
    return PatchPoint(module, attribute, wrapper, parameters, version_module, raises)


PATCH_POINTS = (
    _patch_point(
        "megatron.training.checkpointing:load_checkpoint",
        "mcore_ckpt_ext.megatron.load:wrap_load_checkpoint",
        # The first parameter was renamed from `model` to `ddp_model` between 0.8.0 and 0.12.1.
        "optimizer", "opt_param_scheduler", "load_arg", "strict", raises=_OF_LOADS,
    ),
    _patch_point(
        "megatron.training.checkpointing:load_args_from_checkpoint",
        "mcore_ckpt_ext.megatron.stored_arguments:wrap_load_args",
        "args", "load_arg",
    ),
    _patch_point(
        "megatron.training.checkpointing:save_checkpoint",
        "mcore_ckpt_ext.megatron.save:wrap_save_checkpoint",
        "iteration", "model", "optimizer", "opt_param_scheduler", raises=(_FAILURE,),
    ),
    _patch_point(
        "megatron.training.async_utils:schedule_async_save",
        "mcore_ckpt_ext.megatron.save:wrap_schedule_async_save",
        "async_request", raises=(_FAILURE,),
    ),
    _patch_point(
        "megatron.training.async_utils:maybe_finalize_async_save",
        "mcore_ckpt_ext.megatron.save:wrap_maybe_finalize_async_save",
        "blocking", raises=(_FAILURE,),
    ),
    _patch_point(
        "megatron.core.dist_checkpointing.strategies.state_dict_saver:save_state_dict_async_finalize",
        "mcore_ckpt_ext.megatron.save:wrap_save_state_dict_async_finalize",
        "storage_writer", "global_metadata", "dist_wrapper",
    ),
    # The same step of the strategy `nvrx`; read in 0.6.0, the first release that Megatron 0.18 and later accept.
    _patch_point(
        "nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver:save_state_dict_async_finalize",
        "mcore_ckpt_ext.megatron.save:wrap_save_state_dict_async_finalize",
        "storage_writer", "global_metadata", "dist_wrapper",
        version_module="nvidia_resiliency_ext",
    ),
    _patch_point(
        "megatron.training.arguments:validate_args",
        "mcore_ckpt_ext.megatron.flags:wrap_validate_args",
        "args",
    ),
    # Not validate_args: 0.16.x chooses the writer's queue between parse_args and validate_args
    # (megatron/training/initialize.py:86-92@0.16.1).
    _patch_point(
        "megatron.training.arguments:parse_args",
        "mcore_ckpt_ext.megatron.flags:wrap_parse_args",
        "extra_args_provider", "ignore_unknown_args",
    ),
    # Up to 0.15 in the first module; the same in all releases: see `continuity.cyclic`.
    *(
        _patch_point(
            f"megatron.{module}.data_samplers:MegatronPretrainingRandomSampler.__iter__",
            "mcore_ckpt_ext.megatron.cyclic_sampler:wrap_iter",
            "self",
        )
        for module in ("legacy.data", "training.datasets")
    ),
    _patch_point(
        "megatron.training.dist_signal_handler:DistributedSignalHandler.signals_received",
        "mcore_ckpt_ext.megatron.elastic.ending:wrap_signals_received",
        "self",
    ),
    # Every loop that loads with Megatron Core calls it; read in core_v0.12.1, 0.16.1, 0.19.0 and 0.19.2.
    _patch_point(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict",
        "mcore_ckpt_ext.megatron.core_load:wrap_sharded_state_dict",
        "self", "model_sharded_state_dict", "is_loading",
    ),
    _patch_point(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        "mcore_ckpt_ext.megatron.core_load:wrap_load_state_dict",
        "self", "state_dict",
    ),
    _patch_point(
        "megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict",
        "mcore_ckpt_ext.megatron.core_load:wrap_sharded_state_dict",
        "self", "model_sharded_state_dict", "is_loading",
    ),
    _patch_point(
        "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
        "mcore_ckpt_ext.megatron.core_load:wrap_load_state_dict",
        "self", "state_dict",
    ),
    _patch_point(
        "megatron.core.dist_checkpointing.serialization:load",
        "mcore_ckpt_ext.megatron.core_load:wrap_load",
        "sharded_state_dict", "checkpoint_dir", "sharded_strategy", "strict", raises=_OF_LOADS,
    ),
    _patch_point(
        "megatron.core.dist_checkpointing.serialization:save",
        "mcore_ckpt_ext.megatron.core_save:wrap_save",
        "sharded_state_dict", "checkpoint_dir", "sharded_strategy",
    ),
    _patch_point(
        "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.async_loop",
        "mcore_ckpt_ext.megatron.child_processes:wrap_async_loop",
    ),
    _patch_point(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
        "mcore_ckpt_ext.megatron.child_processes:wrap_results_queue",
    ),
    # 0.2.1 to 0.6.0, and the development head of 22 August 2026.
    _patch_point(
        "megatron.bridge.training.checkpointing:_load_checkpoint_from_path",
        "mcore_ckpt_ext.megatron.third_party:wrap_bridge_load",
        "load_dir", "state", "model", "optimizer", version_module="megatron.bridge",
    ),
    # 4.6.0, and the development head of 22 August 2026.
    _patch_point(
        "swift.megatron.utils.megatron_lm_utils:load_mcore_checkpoint",
        "mcore_ckpt_ext.megatron.third_party:wrap_swift_load",
        "args", "ddp_models", "optimizer", "opt_param_scheduler", version_module="swift.version",
    ),
)  # fmt: skip
