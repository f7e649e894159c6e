"""An optimizer's state saved before its first step: only masters, as the first step creates moments.

fp16 training skips steps until the loss scale fits, and a checkpoint may be saved before. Apex's and Transformer
Engine's Adam create moments, and increment the step in the parameter groups, in `step` (apex/optimizers and
transformer_engine/pytorch/optimizers/fused_adam.py; torch/optim/adam.py does the same for each parameter). Megatron
saves such a state as `dp_reshardable`, or without a distributed optimizer. It fails with a KeyError when it loads the
former, or a torch_dist checkpoint of the latter: it requests moments, which it has created by a step with zero
gradients (`_init_optimizer_states_with_dummy_values`, megatron/core/optimizer/distrib_optimizer.py, and
`init_state_fn`, optimizer.py, core_v0.16.1 to 0.19.2).

The scheduler counts only successful steps (`train_step`, megatron/training/training.py, core_v0.7.0 to 0.19.2).
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
    """Return whether the stored learning rate scheduler is at step 0; False if none was stored."""
    return isinstance(schedule, Mapping) and schedule.get("num_steps") == 0


def lack_first_moments(groups: Collection[Group]) -> bool:
    """Return whether parameter groups belong to an optimizer that has moments, and are at step 0, too."""
    return bool(moments_of(groups)) and not any(group.get("step") for group in groups)


def moments_of(groups: Collection[Group]) -> tuple[str, ...]:
    """Return the moments that every parameter has after a step; empty if none, or if groups differ."""
    rules = {rule_of(group) for group in groups}
    return () if len(rules) != 1 or keeps_nothing(groups) else _MOMENTS[rules.pop()]


def with_step_zero(groups: Collection[Group]) -> list[dict[str, Any]]:
    """Return the groups, at step 0 if their rule counts steps, as Adam does."""
    return [{**group, **({"step": 0} if rule_of(group) == ADAM else {})} for group in groups]


def with_zero_moments(state: OptimizerState, moments: Sequence[str]) -> OptimizerState:
    """Add zero moments to a state that has only masters."""

    def stored_kind(kind: str) -> str:
        return FP32_PARAM if kind in moments else kind

    def logical_tensor(kind: str, name: str) -> LogicalTensor | None:
        tensor = state.logical_tensor(stored_kind(kind), name)
        return LogicalTensor(name, tensor.shape, "float32") if tensor and kind in moments else tensor

    def dtypes_of(name: str) -> dict[str, str]:
        dtypes = state.dtypes_of(name)
        return {**dtypes, **dict.fromkeys(moments if FP32_PARAM in dtypes else (), "float32")}

    return replace(
        StateView.of(state),
        kinds=(*state.kinds, *moments),
        carried_kinds=(*state.carried_kinds, *moments),
        names=lambda kind=None: state.names(kind and stored_kind(kind)),
        logical_tensor=logical_tensor,
        # Moments have the positions of their masters.
        stored_slices=lambda kind, name: state.stored_slices(stored_kind(kind), name),
        copies=lambda kind, name: state.copies(stored_kind(kind), name),
        dtypes_of=dtypes_of,
        derivation=lambda kind, name: _Zeros() if kind in moments else state.derivation(kind, name),
    )


@dataclass(frozen=True, slots=True)
class _Zeros:
    """A derivation without inputs."""

    def inputs(self, wanted: TargetSlice) -> Sequence[tuple[Source, TargetSlice]]:
        """Return no inputs."""
        return []

    def values(self, wanted: TargetSlice, inputs: Sequence[Any]) -> torch.Tensor:
        """Return zeros, one for each element of the slice."""
        return torch.zeros(wanted.slice.numel, dtype=torch.float32)
