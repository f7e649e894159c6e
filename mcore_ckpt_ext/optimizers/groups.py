"""The identity of an optimizer's parameter group, whatever its position: the settings that tell groups apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Group = Mapping[str, Any]

IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Of `DistributedOptimizer.load_state_dict`, core_v0.14 to 0.18."""
BOUNDS = ("max_lr", "min_lr")
"""The learning rate's bounds, which the scheduler takes from each group (core_v0.13 and later)."""
REFINED_IDENTITY = (*IDENTITY, *BOUNDS)
"""With the learning rates' bounds, which 0.19 adds (`param_group_identifier_keys`, megatron/core/optimizer)."""


def has_momentum(group: Group) -> bool:
    """Whether a group is Muon's or SGD's, and not Adam's or Lion's; Muon and Adam may differ in nothing else.

    Their name stands in the groups since core_v0.17 only (`_get_param_groups`, megatron/core/optimizer/__init__.py).
    """
    return "momentum" in group or "momentum_beta" in group


def identity(group: Group, keys: Sequence[str] = IDENTITY) -> tuple[Any, ...]:
    """The values of a group that tell it apart; NeMo prefixes the multipliers with `pre_`."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in keys)
