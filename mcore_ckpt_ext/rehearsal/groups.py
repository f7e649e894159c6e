"""The parameter groups of a job's optimizers, given the options of the job that wrote the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.optimizers.groups import REFINED_IDENTITY, Group, identity, rule_of, with_defaults

_BOUNDS_OF_RATES = {"max_lr": "lr", "min_lr": "min_lr"}


def simulated_groups(
    stored: Sequence[Group], written: JobArguments, running: JobArguments, *, has_expert_optimizer: bool
) -> list[list[dict[str, Any]]]:
    """Return the groups of each optimizer without a step, as in a new optimizer.

    Args:
        stored: all groups of the checkpoint, possibly repeated.
        written: the arguments of the job that wrote it.
        running: the arguments of the job that resumes.
        has_expert_optimizer: whether experts have an optimizer of their own in the resuming job.
    """
    return [
        list(_distinct(stored, written, running, of_experts=of_experts).values())
        for of_experts in ([False, True] if has_expert_optimizer else [False])
    ]


def _distinct(
    stored: Sequence[Group], written: JobArguments, running: JobArguments, *, of_experts: bool
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for group in with_defaults(stored):
        live = {**group, "params": [0], "is_expert_parallel": of_experts}
        live.pop("step", None)
        for bound, rate in _BOUNDS_OF_RATES.items():
            # A group with its own rate, as with --decoupled-lr, keeps it.
            if group.get(bound) is not None and group[bound] == written.raw.get(rate):
                live[bound] = running.raw.get(rate, group[bound])
        found.setdefault(repr((rule_of(live), identity(live, REFINED_IDENTITY))), live)
    return found
