"""The state of an optimizer that was saved before its first step: its masters alone, because a step makes the moments.

fp16 training skips steps until the loss scale fits, and a checkpoint may be saved before one fits. Apex's and
Transformer Engine's Adam create moments, and count a step in the parameter groups, in `step` (apex/optimizers and
transformer_engine/pytorch/optimizers/fused_adam.py; so does torch/optim/adam.py, beside each parameter). Megatron saves
such a state as `dp_reshardable`, or without a distributed optimizer, and ends with a KeyError where it loads the
former, or a torch_dist checkpoint of the latter: it requests moments, which it has created by a step with gradients of
zero (`_init_optimizer_states_with_dummy_values`, megatron/core/optimizer/distrib_optimizer.py, and `init_state_fn`,
optimizer.py, core_v0.16.1 to 0.19.2).

The scheduler advances with successful steps alone (`train_step`, megatron/training/training.py, core_v0.7.0 to 0.19.2).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM, LogicalTensor
from mcore_ckpt_ext.optimizers.description import MOMENTUM
from mcore_ckpt_ext.optimizers.groups import ADAM, LION, Group, keeps_nothing, rule_of
from mcore_ckpt_ext.optimizers.groups import MOMENTUM as BY_MOMENTUM
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.state_view import StateView
from mcore_ckpt_ext.planning.plan import Source, TargetSlice

WITHOUT_STEP = "the optimizer was saved before its first step: its moments are zero"
_MOMENTS = {ADAM: (EXP_AVG, EXP_AVG_SQ), LION: (EXP_AVG,), BY_MOMENTUM: (MOMENTUM,)}


def counts_no_step(schedule: Any) -> bool:
    """Whether the stored state of the learning rate's scheduler counts no step; False where none was stored."""
    return isinstance(schedule, Mapping) and schedule.get("num_steps") == 0


def lack_first_moments(groups: Collection[Group]) -> bool:
    """Whether parameter groups count no step either, of an optimizer that keeps moments."""
    return bool(moments_of(groups)) and not any(group.get("step") for group in groups)


def moments_of(groups: Collection[Group]) -> tuple[str, ...]:
    """The moments of every parameter after a step; empty where there are none, or groups differ in them."""
    rules = {rule_of(group) for group in groups}
    return () if len(rules) != 1 or keeps_nothing(groups) else _MOMENTS[rules.pop()]


def with_step_zero(groups: Collection[Group]) -> list[dict[str, Any]]:
    """The groups as they count from before the first step, where their rule counts steps; Adam's does."""
    return [{**group, **({"step": 0} if rule_of(group) == ADAM else {})} for group in groups]


def with_zero_moments(state: OptimizerState, moments: Sequence[str]) -> OptimizerState:
    """Return a state of masters alone, with the zeros that their moments begin with."""

    def stored_kind(kind: str) -> str:
        return FP32_PARAM if kind in moments else kind

    def logical_tensor(kind: str, name: str) -> LogicalTensor | None:
        found = state.logical_tensor(stored_kind(kind), name)
        return LogicalTensor(name, found.shape, "float32") if found and kind in moments else found

    return replace(
        StateView.of(state),
        kinds=(*state.kinds, *moments),
        carried_kinds=(*state.carried_kinds, *moments),
        names=lambda kind=None: state.names(kind and stored_kind(kind)),
        logical_tensor=logical_tensor,
        # Moments have the places of their masters.
        stored=lambda kind, name: state.stored(stored_kind(kind), name),
        copies=lambda kind, name: state.copies(stored_kind(kind), name),
        derivation=lambda kind, name: _Zeros() if kind in moments else state.derivation(kind, name),
    )


@dataclass(frozen=True, slots=True)
class _Zeros:
    """A derivation from nothing."""

    def inputs(self, wanted: TargetSlice) -> Sequence[tuple[Source, TargetSlice]]:
        """Nothing has to be read."""
        return []

    def values(self, wanted: TargetSlice, inputs: Sequence[Any]) -> torch.Tensor:
        """As many zeros as the slice has elements."""
        return torch.zeros(wanted.slice.numel, dtype=torch.float32)
