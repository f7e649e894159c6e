"""Optimizer entries in the common state of a `torch_dist` checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.optimizers.groups import checked_optimizer

SCHEDULERS = ("lr_scheduler", "opt_param_scheduler")
"""Keys of the learning rate scheduler's state, in the order in which `load_checkpoint` looks them up."""


def common_optimizers(common: Mapping[str, Any]) -> list[dict[Any, Any]]:
    """Return the optimizer's entries in the common state: one, or one for each chained optimizer.

    Raises:
        UnreadableCheckpointError: see `checked_optimizer`.
    """
    state = common.get("optimizer")
    if not isinstance(state, dict):
        return []
    children = [child for key, child in state.items() if isinstance(key, int) and isinstance(child, dict)]
    return [checked_optimizer(child) for child in children or [state]]


def scheduler_in(common: Mapping[str, Any]) -> Any:
    """Return the stored state of the learning rate scheduler; None if there is none."""
    return next((common[key] for key in SCHEDULERS if key in common), None)


def sharding_type(common: Mapping[str, Any]) -> str | None:
    """Return Megatron's name of the optimizer's sharding type, from the common state.

    The optimizer's own entry takes precedence in all versions, then the content metadata (since core_v0.13.0).
    """
    state = common.get("optimizer")
    children = [state, *state.values()] if isinstance(state, dict) else []
    for child in children:
        if isinstance(child, dict) and "param_state_sharding_type" in child:
            return str(child["param_state_sharding_type"])
    metadata = common.get("content_metadata")
    recorded_type = metadata.get("distrib_optim_sharding_type") if isinstance(metadata, dict) else None
    return str(recorded_type) if recorded_type else None
