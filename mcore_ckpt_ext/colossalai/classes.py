"""ColossalAI's classes, at the location of the installed version, and subclasses with strict methods."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from mcore_ckpt_ext.colossalai.hybrid_parallel import HybridParallelCheckpointIOMethods, HybridParallelOptimizerMethods
from mcore_ckpt_ext.colossalai.low_level_zero import LowLevelZeroCheckpointIOMethods, LowLevelZeroMethods
from mcore_ckpt_ext.colossalai.methods import CheckpointIOMethods, OptimizerMethods, WrapperMethods
from mcore_ckpt_ext.colossalai.replaced import ReplacedMethods
from mcore_ckpt_ext.errors import CheckpointError


class Target(NamedTuple):
    """A class that gets strict methods.

    Args:
        locations: the class's locations in different versions.
        methods: the class with the strict methods.
        own: methods that the class itself must define, so that the strict methods fit; a class without them is left
            alone.
        required: the first version that has the class, if it is indispensable; else None.
    """

    locations: tuple[str, ...]
    methods: type[ReplacedMethods]
    own: tuple[str, ...]
    required: str | None = None


# ZeroDDP comes before GeminiDDP: if both exist (up to 0.3.1), the latter inherits from the former.
WRAPPER = Target(
    (
        "colossalai.zero.gemini.gemini_ddp:ZeroDDP",
        "colossalai.nn.parallel.data_parallel:ZeroDDP",
        "colossalai.zero.gemini.gemini_ddp:GeminiDDP",
    ),
    WrapperMethods,
    # 0.1.x, whose chunks differ, has no method of the third name.
    own=("state_dict", "load_state_dict", "_get_param_to_save_data"),
    required="0.2.0",
)
# Their state can be saved since 0.3.2; the classes of these names in 0.3.0 do not support it.
OPTIMIZER = Target(
    ("colossalai.zero.gemini.gemini_optimizer:GeminiOptimizer",),
    OptimizerMethods,
    own=("collect_states", "get_param_groups_for_saving", "load_param_groups", "optimizer_loading_epilogue"),
)
CHECKPOINT_IO = Target(
    ("colossalai.booster.plugin.gemini_plugin:GeminiCheckpointIO",),
    CheckpointIOMethods,
    own=("save_unsharded_model", "save_sharded_model", "load_sharded_model", "load_sharded_optimizer"),
)
LOW_LEVEL_OPTIMIZER = Target(
    ("colossalai.zero.low_level.low_level_optim:LowLevelZeroOptimizer",),
    LowLevelZeroMethods,
    own=("state_dict", "load_state_dict", "state_dict_shard", "update_master_params", "get_master_to_working_map"),
    required="0.5.0",
)
LOW_LEVEL_CHECKPOINT_IO = Target(
    ("colossalai.booster.plugin.low_level_zero_plugin:LowLevelZeroCheckpointIO",),
    LowLevelZeroCheckpointIOMethods,
    own=("save_sharded_optimizer", "load_sharded_optimizer"),
)
_HYBRID = "colossalai.booster.plugin.hybrid_parallel_plugin"
HYBRID_AMP_OPTIMIZER = Target(
    (f"{_HYBRID}:HybridParallelAMPOptimizer",), HybridParallelOptimizerMethods, own=("backward",), required="0.5.0"
)
HYBRID_ZERO_OPTIMIZER = Target(
    (f"{_HYBRID}:HybridParallelZeroOptimizer",), HybridParallelOptimizerMethods, own=("backward",), required="0.5.0"
)
HYBRID_CHECKPOINT_IO = Target(
    ("colossalai.checkpoint_io.hybrid_parallel_checkpoint_io:HybridParallelCheckpointIO",),
    HybridParallelCheckpointIOMethods,
    own=("_model_sharder", "gather_from_sharded_optimizer_state", "load_states_into_optimizer", "save_sharded_model"),
    required="0.5.0",
)
STATIC_MODEL = "get_static_torch_model"
# Modules with ColossalAI's own function of that name: 0.3.0 and later, and 0.2.1 to 0.2.8.
STATIC_MODEL_MODULES = (
    "colossalai.zero",
    "colossalai.zero.gemini",
    "colossalai.zero.gemini.utils",
    "colossalai.nn.parallel.utils",
)
PLUGINS = {
    "gemini": (WRAPPER, OPTIMIZER, CHECKPOINT_IO),
    "low_level_zero": (LOW_LEVEL_OPTIMIZER, LOW_LEVEL_CHECKPOINT_IO),
    "hybrid_parallel": (HYBRID_AMP_OPTIMIZER, HYBRID_ZERO_OPTIMIZER, HYBRID_CHECKPOINT_IO),
}


def find(target: Target) -> type | None:
    """Return the class in the installed version; None if it is absent and not required.

    Raises:
        CheckpointError: ColossalAI is not installed, cannot be imported, or lacks a required class.
    """
    problems = []
    for location in target.locations:
        module, _, name = location.partition(":")
        try:
            candidate = getattr(import_module(module), name, None)
        except Exception as error:  # noqa: BLE001 - the user needs the cause, whatever makes a framework's import fail
            problems.append(f"{module}: {error}")
            continue
        if isinstance(candidate, type) and all(method in vars(candidate) for method in target.own):
            return candidate
        problems.append(f"{module} has no suitable {name}")
    if target.required is None:
        return None
    names = dict.fromkeys(location.partition(":")[2] for location in target.locations)
    raise CheckpointError(
        f"ColossalAI's {' or '.join(names)} is not available",
        found="; ".join(dict.fromkeys(problems)),
        expected=f"ColossalAI {target.required} or later",
        hint="pip install colossalai==0.5.0, in the environment of the training job",
    )


def strict_subclass(target: Target, name: str) -> Any:
    """Make a subclass with the strict methods, for users who do not patch."""
    base = find(target)
    if base is None:
        raise CheckpointError(f"this version of ColossalAI has no {target.locations[0].partition(':')[2]}")
    # If GeminiDDP exists, users construct it and not ZeroDDP.
    newest = getattr(import_module(base.__module__), "GeminiDDP", base) if target is WRAPPER else base
    return type(name, (newest,), {**target.methods.namespace(newest), "__doc__": target.methods.__doc__})
