"""The parameter groups of a job's optimizers, given the options of the job that wrote the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_ckpt_ext.formats.param_group_assignment import decay_of, decays_by_rule, is_decoupled
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.names import is_of_experts
from mcore_ckpt_ext.optimizers.groups import REFINED_IDENTITY, Group, identity, rule_of, with_defaults

_BOUNDS_OF_RATES = {"max_lr": "lr", "min_lr": "min_lr"}


def simulated_groups(
    stored: Sequence[Group],
    written: JobArguments,
    running: JobArguments,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    has_expert_optimizer: bool,
) -> list[list[dict[str, Any]]]:
    """Return the groups of each optimizer without a step, as in a new optimizer.

    Args:
        stored: all groups of the checkpoint, possibly repeated.
        written: the arguments of the job that wrote it.
        running: the arguments of the job that resumes.
        shapes: the shape of each parameter.
        has_expert_optimizer: whether experts have an optimizer of their own in the resuming job.
    """
    optimizers = []
    for of_experts in [False, True] if has_expert_optimizer else [False]:
        decays = {
            decays_by_rule(name, shape, running)
            for name, shape in shapes.items()
            if not has_expert_optimizer or is_of_experts(name) is of_experts
        }
        # Experts without biases have no group without weight decay.
        has_rule = not running.raw.get("no_weight_decay_cond_type")
        groups = [group for group in with_defaults(stored) if not has_rule or bool(decay_of(group)) in decays]
        optimizers.append(list(_distinct(groups, written, running, of_experts=of_experts).values()))
    return optimizers


def _distinct(
    groups: Sequence[Group], written: JobArguments, running: JobArguments, *, of_experts: bool
) -> dict[str, dict[str, Any]]:
    distinct: dict[str, dict[str, Any]] = {}
    rates = decoupled_bounds(running)
    was_decoupled = any(is_decoupled(group, written) for group in groups)
    for group in groups:
        live = {**group, "params": [0], "is_expert_parallel": of_experts}
        live.pop("step", None)
        if is_decoupled(group, written):
            variants = [{**live, **rates}] if rates else []
        else:
            for bound, rate in _BOUNDS_OF_RATES.items():
                # A group may have other bounds by overrides of its own, which it keeps.
                if group.get(bound) is not None and group[bound] == written.raw.get(rate):
                    live[bound] = running.raw.get(rate, group[bound])
            variants = [live]
            if rates and not was_decoupled and not of_experts and decay_of(group):
                variants.append({**live, **rates, **({"default_config": False} if "default_config" in live else {})})
        for variant in variants:
            distinct.setdefault(repr((rule_of(variant), identity(variant, REFINED_IDENTITY))), variant)
    return distinct


def decoupled_bounds(running: JobArguments) -> dict[str, Any]:
    """Return the bounds of the group of embeddings and output layers; empty without --decoupled-lr.

    Source: `get_standard_config_overrides`, megatron/core/optimizer/__init__.py, core_v0.16.0 to 0.19.2;
    `_update_min_and_max_lr_in_param_groups` before.
    """
    highest = running.decoupled_lr
    lowest = running.decoupled_min_lr
    if highest is None:
        return {}
    return {"max_lr": highest, "min_lr": running.raw.get("min_lr") if lowest is None else lowest}
