"""Carries parameter groups over from a checkpoint to a live optimizer, by settings, not position.

Stages order their groups by first use, and a stage lacks groups for which it has no parameter, so positions mean
nothing across layouts (megatron/core/optimizer/__init__.py; by position up to core_v0.13, by identity since 0.14).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_ckpt_ext.errors import ModelMismatchError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.job.releases import MATCHES_GROUPS_BY_BOUNDS
from mcore_ckpt_ext.optimizers.groups import (
    ADAM,
    BOUNDS,
    DEFAULTS,
    IDENTITY,
    NOT_SETTINGS,
    OF_THE_JOB,
    REFINED_IDENTITY,
    Group,
    identity,
    rule_of,
    with_defaults,
)

_SETTINGS = tuple(key for key in IDENTITY if key != "is_expert_parallel")
# What the live optimizer keeps.
_OWN = NOT_SETTINGS | OF_THE_JOB
# Settings that the scheduler writes into a group at every step, and their inputs (`step`, `get_lr` and `get_wd`,
# megatron/core/optimizer_param_scheduler.py, core_v0.13.0 to 0.19.2); they do not identify a group.
_SCHEDULED = ("lr", "weight_decay", "start_wd", "end_wd", *BOUNDS)


def carried_groups(live: Sequence[Group], stored: Sequence[Group], own_bounds: bool = False) -> list[dict[str, Any]]:
    """Return the values of every live group after the resume, without `params`, in the live order.

    Args:
        live: the live inner optimizer's groups.
        stored: all groups of the checkpoint, repetitions allowed.
        own_bounds: keep the learning rates' bounds of the live groups, as --override-opt_param-scheduler requests; the
            scheduler computes their rates from them.

    Raises:
        ModelMismatchError: a live group with parameters has no counterpart, or several different ones. Or its only
            counterpart has other bounds, and another live group differs from it only in bounds.
    """
    whole = with_defaults(stored)
    return [_carry_settings(group, live, whole, own_bounds) for group in live]


def takes_own_bounds(arguments: Mapping[str, Any], version: tuple[int, int]) -> bool:
    """Return True if a new learning rate applies, by --override-opt_param-scheduler, as since 0.20.

    Before 0.19, stock Megatron and this package keep the stored bounds; stock 0.19 fails, because it does not find the
    stored groups. 0.20 takes the bounds from the arguments (`load_checkpoint`). The bounds of the live groups also
    follow from the arguments, including --use-mup and overrides, which 0.20 omits (`get_megatron_optimizer`,
    megatron/core/optimizer/__init__.py, core_v0.19.2).

    Args:
        arguments: Megatron's arguments of the job that resumes.
        version: the version of its Megatron.
    """
    return bool(arguments.get("override_opt_param_scheduler")) and MATCHES_GROUPS_BY_BOUNDS.is_of(version)


def with_step(stored: Sequence[Group], common: Mapping[str, Any], batch_size: int | None) -> list[dict[str, Any]]:
    """Return the groups, with the step added to Adam's groups if it was not saved.

    With HybridDeviceOptimizer, Megatron only reads the step of torch's Adam, and saves none on ranks that offload
    nothing (`DistributedOptimizer.state_dict`, megatron/core/optimizer/distrib_optimizer.py, core_v0.12.1 to 0.19.2).
    The scheduler counts the samples of all steps (`train_step`, megatron/training/training.py), so it shows whether
    every iteration made a step.

    Args:
        stored: all groups of the checkpoint.
        common: its common state.
        batch_size: the global batch size of the job; None if unknown. Samples do not add up if it has varied.

    Raises:
        UnsupportedCheckpointError: no group has a step, and it cannot be derived.
    """
    lacking = [group for group in stored if "eps" in group and rule_of(group) == ADAM and "step" not in group]
    steps = {int(group["step"]) for group in stored if "step" in group}
    if not lacking or len(steps) > 1:
        return [dict(group) for group in stored]
    step = steps.pop() if steps else _steps_made(common, batch_size)
    return [{**group, "step": step} if group in lacking else dict(group) for group in stored]


def _steps_made(common: Mapping[str, Any], batch_size: int | None) -> int:
    """Return the number of steps that the job has made, by its scheduler."""
    iteration = int(common.get("iteration", 0))
    samples = common.get("opt_param_scheduler", {}).get("num_steps")
    if iteration and (not batch_size or samples != iteration * batch_size):
        scheduled = quantity(samples or 0, "sample")
        raise UnsupportedCheckpointError(
            "the checkpoint does not record the number of Adam steps",
            found=f"no step in any parameter group; iteration {iteration}, {scheduled} scheduled",
            expected=f"a step, or {batch_size or 'a known number of'} samples an iteration",
            hint="if the optimizer had not stepped yet (fp16 skips steps), resume with --no-load-optim; with "
            "--optimizer-cpu-offload and nothing offloaded Megatron saves no step: save once with "
            "--optimizer-offload-fraction above 0",
        )
    return iteration


def _carry_settings(group: Group, live: Sequence[Group], stored: Sequence[Group], own_bounds: bool) -> dict[str, Any]:
    live_settings = {key: value for key, value in group.items() if key != "params"}
    stored = [candidate for candidate in stored if rule_of(candidate) == rule_of(group)] or stored
    matches = [candidate for candidate in stored if _identity(candidate) == _identity(group)]
    if not matches:
        # With one expert-parallel rank, experts are ordinary parameters.
        matches = [candidate for candidate in stored if _identity(candidate, _SETTINGS) == _identity(group, _SETTINGS)]
    of_kind = [candidate for candidate in matches if _has_rate_of_same_kind(candidate, group)]
    matches = of_kind or matches
    refined = [
        candidate
        for candidate in matches
        if _identity(candidate, REFINED_IDENTITY) == _identity(group, REFINED_IDENTITY)
    ]
    if refined:
        matches = refined
    elif _distinct(matches) > 1 or _has_sibling(group, live, bool(of_kind)):  # only settings distinguish the candidates
        # --use-mup also scales Adam's epsilon by the width (`get_mup_config_overrides`, since core_v0.17.0).
        matches = [candidate for candidate in matches if candidate.get("eps") == group.get("eps")] or matches
        matches = matches[:1] if own_bounds and _distinct(matches, *_SCHEDULED) == 1 else []
    if _distinct(matches) == 1:
        kept = (*_OWN, *BOUNDS) if own_bounds else _OWN
        return {**live_settings, **{key: value for key, value in matches[0].items() if key not in kept}}
    if not group["params"] and stored:
        # The group trains nothing on this rank; its step must still be that of all groups.
        return {**live_settings, **({"step": stored[0]["step"]} if "step" in stored[0] else {})}
    if len({group.get("step") for group in matches}) > 1 and _distinct(matches, "step") == 1:
        raise UnsupportedCheckpointError(
            "the checkpoint has different steps for the same parameter group",
            found=f"steps {', '.join(sorted(str(group.get('step')) for group in matches))}",
            expected="one step",
            hint="its optimizer state mixes several steps: resume from another iteration",
        )
    raise ModelMismatchError(
        "a parameter group of the optimizer has no single counterpart in the checkpoint",
        found="; ".join(dict.fromkeys(map(_describe, stored))) or "none",
        expected=_describe(group),
        hint="resume with the weight-decay and learning-rate options that the checkpoint was written with; "
        "since Megatron 0.19, --override-opt_param-scheduler allows other learning rates",
    )


def _has_rate_of_same_kind(stored: Group, live: Group) -> bool:
    """Return True if both groups have the job's learning rate, or both their own (--decoupled-lr)."""
    kinds = stored.get("default_config"), live.get("default_config")
    return None not in kinds and kinds[0] == kinds[1]


def _identity(group: Group, keys: Sequence[str] = IDENTITY) -> tuple[Any, ...]:
    """Return the values of a group that identify it; an absent value is its default."""
    values = zip(keys, identity(group, keys), strict=True)
    return tuple(DEFAULTS.get(key) if value is None else value for key, value in values)


def _has_sibling(group: Group, live: Sequence[Group], kinds_are_known: bool) -> bool:
    """Return True if another group that trains something differs in bounds only, as by --decoupled-lr.

    Args:
        group: a live group.
        live: all live groups.
        kinds_are_known: groups with the job's learning rate are distinguished from groups with their own.
    """
    alike = (other for other in live if other.get("params") != [] and rule_of(other) == rule_of(group))
    alike = (other for other in alike if _identity(other) == _identity(group))
    alike = (other for other in alike if not kinds_are_known or _has_rate_of_same_kind(other, group))
    return any(_identity(other, BOUNDS) != _identity(group, BOUNDS) for other in alike)


def _describe(group: Group) -> str:
    named = zip(REFINED_IDENTITY, _identity(group, REFINED_IDENTITY), strict=True)
    return f"a group of {rule_of(group)} with " + ", ".join(f"{key} {value}" for key, value in named)


def _distinct(groups: Sequence[Group], *but: str) -> int:
    """Return the number of groups that differ in values that are carried over, except the keys in `but`."""
    plain = [{k: v for k, v in group.items() if k not in _OWN and k not in but} for group in groups]
    return len({repr(sorted(group.items())) for group in plain})
