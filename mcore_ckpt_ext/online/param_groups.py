"""Parameter groups carried from a checkpoint to a live optimizer by what they are, never by their position.

Stages order their groups by first use, and a stage lacks groups that it has no parameter for, so positions mean
nothing across layouts (megatron/core/optimizer/__init__.py; by position up to core_v0.13, by identity since 0.14).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_ckpt_ext.errors import ModelMismatchError

Group = Mapping[str, Any]

# `DistributedOptimizer.load_state_dict`, core_v0.14 to 0.18; 0.19 adds the learning rates' bounds.
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_SETTINGS = tuple(key for key in _IDENTITY if key != "is_expert_parallel")
_REFINEMENT = ("max_lr", "min_lr")


def identity(group: Group, keys: Sequence[str] = _IDENTITY) -> tuple[Any, ...]:
    """What a group is; NeMo prefixes the multipliers with `pre_`."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in keys)


def carried_groups(live: Sequence[Group], stored: Sequence[Group]) -> list[dict[str, Any]]:
    """For every live group its values after the resume, without `params`, in the live order.

    Args:
        live: the live inner optimizer's groups.
        stored: all groups of the checkpoint, repetitions allowed.

    Raises:
        ModelMismatchError: a live group with parameters has no counterpart, or several that differ.
    """
    return [_carried(group, stored) for group in live]


def _carried(group: Group, stored: Sequence[Group]) -> dict[str, Any]:
    own = {key: value for key, value in group.items() if key != "params"}
    matches = [candidate for candidate in stored if identity(candidate) == identity(group)]
    if not matches:
        # Experts are ordinary parameters as long as there is one expert-parallel rank.
        matches = [candidate for candidate in stored if identity(candidate, _SETTINGS) == identity(group, _SETTINGS)]
    if _distinct(matches) > 1:
        refined = _IDENTITY + _REFINEMENT
        matches = [candidate for candidate in matches if identity(candidate, refined) == identity(group, refined)]
    if _distinct(matches) == 1:
        carried = {key: value for key, value in matches[0].items() if key not in ("params", "is_expert_parallel")}
        return {**own, **carried}
    if not group["params"] and stored:
        # Nothing is trained by it on this rank; the step must still be the one of all groups.
        return {**own, **({"step": stored[0]["step"]} if "step" in stored[0] else {})}
    raise ModelMismatchError(
        "a parameter group of the optimizer has no single counterpart in the checkpoint",
        found=f"{[dict(zip(_IDENTITY, identity(g), strict=True)) for g in stored]}",
        expected=f"{dict(zip(_IDENTITY, identity(group), strict=True))}",
        helps="resume with the weight-decay and learning-rate options that the checkpoint was written with",
    )


def _distinct(groups: Sequence[Group]) -> int:
    """How many groups differ in more than what they hold and whether that are experts."""
    plain = [{k: v for k, v in group.items() if k not in ("params", "is_expert_parallel")} for group in groups]
    return len({repr(sorted(group.items())) for group in plain})
