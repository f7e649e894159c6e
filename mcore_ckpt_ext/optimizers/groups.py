"""The identity of an optimizer's parameter group: the settings that distinguish groups.

It is independent of the group's position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, format_value
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ

Group = Mapping[str, Any]
_PLAIN = (bool, int, float, str, NoneType)
ADAM = "Adam"
LION = "Lion"
MOMENTUM = "momentum"

IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""The settings that `DistributedOptimizer.load_state_dict` compares, core_v0.14 to 0.18."""
BOUNDS = ("max_lr", "min_lr")
"""The learning rate's bounds, which the scheduler reads from each group (core_v0.13 and later)."""
REFINED_IDENTITY = (*IDENTITY, *BOUNDS)
"""`IDENTITY` with the bounds, which 0.19 adds (`param_group_identifier_keys`, megatron/core/optimizer)."""
DEFAULTS: Mapping[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
"""A group's values by default (`_get_param_groups`, core/optimizer/__init__.py, 0.7 to 0.19)."""
NOT_SETTINGS = frozenset({"params", "cpu_optimizer_cls", "gpu_optimizer_cls"})
"""Entries of a group that are not settings; the classes are those of `HybridDeviceOptimizer`."""
OF_THE_JOB = frozenset(
    {
        "is_expert_parallel",
        "offload_fraction",
        "param_update_in_fp32",
        "pin_cpu_grads",
        "pin_cpu_params",
        "overlap_cpu_optimizer_d2h_h2d",
        "fused",
        "foreach",
        "capturable",
        "differentiable",
        "default_config",
    }
)
"""Settings of the running job: what a group belongs to, and how its steps are computed, without effect on the result.

`default_config` says that the group has the job's learning rate, by which Megatron selects the rate to log
(`_get_param_groups`). (HybridDeviceOptimizer.__init__, megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py,
core_v0.11.0 to 0.19.2; torch.optim.AdamW.)"""
_PLAIN_ONES = (*REFINED_IDENTITY, *(f"pre_{key}" for key in IDENTITY))


def checked_groups(stored: Any) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups, after a check of their structure.

    Raises:
        UnreadableCheckpointError: Megatron does not write such groups.
    """
    groups = list(stored) if isinstance(stored, (list, tuple)) else [stored]
    for group in groups:
        is_group = isinstance(group, dict) and all(isinstance(key, str) for key in group)
        invalid = [key for key in _PLAIN_ONES if is_group and not isinstance(group.get(key), _PLAIN)]
        if not is_group or invalid:
            raise UnreadableCheckpointError(
                "parameter groups of the optimizer are not as Megatron writes them",
                found=f"{invalid[0]} {format_value(group[invalid[0]])}"
                if invalid
                else f"a group that is a {type(group).__name__}",
                expected="settings by name, of which these are plain values" if invalid else "settings by name",
                hint="the checkpoint was edited: use another iteration",
            )
    return groups


def checked_optimizer(stored: Any) -> dict[Any, Any]:
    """Return an optimizer's entry in a state, after a check of its structure and its groups.

    Raises:
        UnreadableCheckpointError: Megatron does not write such an entry.
    """
    inner = stored.get("optimizer", stored) if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or not isinstance(inner, (dict, NoneType)):
        raise UnreadableCheckpointError(
            "the state of an optimizer is not as Megatron writes it",
            found=type(stored if inner is None else inner).__name__,
            expected="a dict",
            hint="the checkpoint was edited: use another iteration",
        )
    for state in (stored, inner):
        if state is not None and "param_groups" in state:
            checked_groups(state["param_groups"])
    return stored


def rule_of(group: Group) -> str:
    """Return the update rule of a group: Adam, Lion, or momentum, which Muon and SGD use.

    The rule may be the only difference between groups, which have their optimizer's name only since core_v0.17
    (`_get_param_groups`, megatron/core/optimizer/__init__.py). Lion has Adam's `betas`, and no `eps`
    (emerging_optimizers/scalar_optimizers/lion.py, 0.3.0).
    """
    if "momentum" in group or "momentum_beta" in group:
        return MOMENTUM
    return LION if "betas" in group and "eps" not in group else ADAM


def rule_that_keeps(kinds: Collection[str]) -> str:
    """Return the update rule for parameters with state of these kinds; no kinds but masters mean SGD."""
    if EXP_AVG in kinds:
        return ADAM if EXP_AVG_SQ in kinds else LION
    return MOMENTUM


def keeps_nothing(groups: Collection[Group]) -> bool:
    """Return whether SGD without momentum updates all groups; it has no state.

    Source: torch/optim/sgd.py, 2.1 to 2.13.
    """
    return bool(groups) and all(group.get("momentum") == 0 for group in groups)


def with_defaults(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """Return one optimizer's groups, with defaults for identifying settings that the writer left out.

    ms-swift 4.1 and 4.2 remove `lr_mult` before they save. The scheduler writes the product of the job's weight decay
    and `wd_mult` to every group (`OptimizerParamScheduler.step`, megatron/core/optimizer_param_scheduler.py, 0.7 to
    0.19). So a group without decay, among others with decay, has the multiplier 0.
    """
    groups = list(groups)
    decays = any(group.get("weight_decay") for group in groups)

    def default_of(group: Group, key: str) -> Any:
        has_none = key == "wd_mult" and decays and group.get("weight_decay") == 0
        return 0.0 if has_none else DEFAULTS[key]

    return [{**{key: default_of(group, key) for key in IDENTITY if lacks(group, key)}, **group} for group in groups]


def strip_prefix(group: Group) -> dict[str, Any]:
    """Return a group with its identifying settings under Megatron's names; NeMo adds the prefix `pre_`."""
    prefixed = {key: group[f"pre_{key}"] for key in IDENTITY if f"pre_{key}" in group}
    return {**prefixed, **{key: value for key, value in group.items() if not key.startswith("pre_")}}


def lacks(group: Group, key: str) -> bool:
    """Return whether a group lacks an identifying setting under both of its possible names."""
    return key not in group and f"pre_{key}" not in group


def identity(group: Group, keys: Sequence[str] = IDENTITY) -> tuple[Any, ...]:
    """Return the identifying values of a group; NeMo adds the prefix `pre_` to the multipliers."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in keys)
