"""Assigns a parameter to one of an optimizer's parameter groups by Megatron's rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.anatomy import VOCABULARY
from mcore_ckpt_ext.model_space.names import is_of_experts
from mcore_ckpt_ext.optimizers.groups import identity

_DECOUPLED = "is_decoupled_lr"


def group_that_holds(
    name: str, shape: tuple[int, ...], groups: Sequence[Mapping[str, Any]], arguments: JobArguments
) -> int:
    """Return the number of the group that a parameter is in.

    Source: `_get_param_groups` (megatron/core/optimizer/__init__.py).

    Biases and arrays with one axis have no weight decay, except norms of queries and keys if the job applies it to them
    (`get_standard_config_overrides`, since core_v0.16.0). Experts with expert parallelism, and embeddings and output
    layers with a decoupled learning rate, have groups of their own. Since core_v0.16.0 a group of the latter records no
    more than its rate: `is_decoupled_lr` is always False there.

    Args:
        name: the parameter's name in model space.
        shape: its shape.
        groups: all distinct groups.
        arguments: the arguments of the job that wrote them.

    Raises:
        UnsupportedCheckpointError: the groups differ in other settings, or no group fits the parameter.
    """
    decays = float(decays_by_rule(name, shape, arguments))
    expected = {"wd_mult": decays, "is_expert_parallel": is_of_experts(name), _DECOUPLED: name.endswith(VOCABULARY)}
    groups = [{**group, _DECOUPLED: is_decoupled(group, arguments)} for group in groups]
    fit = list(range(len(groups)))
    for setting, value in expected.items():
        values = {bool(_setting(group, setting)) for group in groups}
        if len(values) > 1 or (setting == "wd_mult" and any(decay_of(group) is not None for group in groups)):
            fit = [number for number in fit if _setting(groups[number], setting) == value]
    if len(fit) != 1 or arguments.raw.get("no_weight_decay_cond_type"):
        raise UnsupportedCheckpointError(
            "the parameter group of each parameter is unknown",
            found=f"{quantity(len(fit), 'group that fits', 'groups that fit')}",
            expected="one with and one without weight decay, of dense parameters and of experts",
            where=name,
            hint="use --to torch_dist, or --drop optimizer",
        )
    return fit[0]


def decays_by_rule(name: str, shape: tuple[int, ...], arguments: JobArguments) -> bool:
    """Return whether a parameter has weight decay."""
    of_queries_or_keys = "q_layernorm." in name or "k_layernorm." in name
    if arguments.raw.get("apply_wd_to_qk_layernorm") and of_queries_or_keys:
        return True
    return not name.endswith(".bias") and len(shape) != 1


def decay_of(group: Mapping[str, Any]) -> Any:
    """Return a group's multiplier of the weight decay; None if it does not record one."""
    return identity(group, ("wd_mult",))[0]


def is_decoupled(group: Mapping[str, Any], arguments: JobArguments) -> bool:
    """Return whether a group has the rate of a job's embeddings and output layers (--decoupled-lr)."""
    rate = arguments.decoupled_lr
    return bool(_setting(group, _DECOUPLED)) or rate not in (None, arguments.lr) and group.get("max_lr") == rate


def _setting(group: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a group; False if the group does not record it."""
    (recorded,) = identity(group, (name,))
    return False if recorded is None else recorded
