"""Checks settings of parameter groups and of the scheduler: missing or impossible ones are findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from mcore_ckpt_ext.errors import format_value, join_some
from mcore_ckpt_ext.formats.common_state import scheduler_in
from mcore_ckpt_ext.formats.param_group_assignment import decay_of, decays_by_rule
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.lazy_torch import is_tensor
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM
from mcore_ckpt_ext.operations.findings import COMPLETE, VALUES, Finding, error, warning
from mcore_ckpt_ext.optimizers.groups import ADAM, rule_of
from mcore_ckpt_ext.planning.plan import named_tensor
from mcore_ckpt_ext.storage.tensor_reference import TensorReference

# Settings that every parameter group needs, and Adam's groups besides (torch.optim, Transformer Engine's FusedAdam).
_NEEDED = ("lr", "weight_decay")
_OF_ADAM = ("eps",)
# Settings that select a group of Megatron (`_get_param_groups`, megatron/core/optimizer/__init__.py, core_v0.7.0 to
# 0.19.2), and their types.
_NUMBERS = ("lr_mult", "wd_mult")
_SWITCHES = ("is_expert_parallel", "is_decoupled_lr")


def check_settings(checkpoint: CheckpointView, groups: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield impossible settings of a checkpoint's parameter groups and its scheduler.

    An absent or non-numeric setting is an error; a non-finite one is a warning: the next step would make the weights
    non-finite.
    """
    problems: dict[str, bool] = {}
    for group in groups:
        for key in _NEEDED + (_OF_ADAM if rule_of(group) == ADAM else ()):
            if not _is_number(group.get(key)):
                problems[f"{key} is {format_value(group[key])}" if key in group else f"a group has no {key}"] = True
        mistyped = [key for key in _NUMBERS if group.get(key) is not None and not _is_plain_number(group[key])]
        mistyped += [key for key in _SWITCHES if group.get(key) is not None and not isinstance(group[key], bool)]
        problems |= {f"{key} is {format_value(group[key])}": True for key in mistyped} | _odd(group)
    yield from _findings("parameter groups", problems)
    scheduler = scheduler_in(checkpoint.job.common())
    if scheduler is not None:
        wrong = {f"it is a {type(scheduler).__name__}": True} if not isinstance(scheduler, Mapping) else _odd(scheduler)
        steps = scheduler.get("num_steps", 0) if isinstance(scheduler, Mapping) else 0
        yield from _findings("scheduler", wrong if _is_number(steps) else {f"num_steps is {format_value(steps)}": True})
    elif checkpoint.job.arguments().is_complete:
        message = "missing: a resume with the optimizer needs one, and is refused"
        yield warning(COMPLETE, "scheduler", message)


def check_group_of_each(checkpoint: CheckpointView, groups: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield parameters without a group, by Megatron's rule; other loops may differ. Needs the packing."""
    there = {None if (decay := decay_of(group)) is None else bool(decay) for group in groups}
    if not there or None in there:
        return
    without: dict[bool, list[str]] = {}
    for name in checkpoint.names(FP32_PARAM):
        decays = decays_by_rule(name, named_tensor(checkpoint, FP32_PARAM, name).shape, checkpoint.job.arguments())
        if decays not in there:
            without.setdefault(decays, []).append(name)
    for decays, names in without.items():
        message = f"there is none with{'' if decays else 'out'} weight decay, as Megatron has for {join_some(names, 2)}"
        yield warning(VALUES, "parameter groups", message)


def _is_number(value: object) -> bool:
    # A fused optimizer for CUDA graphs (`capturable`) keeps numbers as tensors.
    return isinstance(value, (int, float, TensorReference)) or is_tensor(value)


def _is_plain_number(value: object) -> bool:
    return _is_number(value) and not isinstance(value, bool)


def _odd(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Return the settings that are not finite, in words."""
    odd = ((key, value) for key, value in settings.items() if isinstance(value, float) and not isfinite(value))
    return {f"{key} is {value}": False for key, value in odd}


def _findings(where: str, problems: Mapping[str, bool]) -> Iterator[Finding]:
    for message, is_error in sorted(problems.items()):
        yield (error if is_error else warning)(VALUES, where, message)
