"""Writes optimizers that are not distributed into legacy files: one tensor per parameter of a rank.

Sources: `Float16OptimizerWithFloat16Params.state_dict` and `FP32Optimizer.state_dict` (optimizer.py), and
`_get_param_groups` (__init__.py), megatron/core/optimizer, core_v0.9.0 to 0.19.2. torch's own dict numbers parameters
across the groups, in the order of registration within each group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.param_group_assignment import group_that_holds
from mcore_ckpt_ext.formats.portable_state import inner_state
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.names import is_of_experts
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.optimizers.groups import rule_of, rule_that_keeps
from mcore_ckpt_ext.optimizers.legacy_masters import MASTERS
from mcore_ckpt_ext.planning.plan import named_tensor
from mcore_ckpt_ext.storage.pickling import DeclaredTensor

Part = Callable[[str, str], DeclaredTensor]
"""A rank's part of the state of a kind and a name."""


class WholeStates:
    """Lays out the `state_dict` of each chained optimizer on a rank.

    Args:
        checkpoint: the source.
        chain: the settings of each optimizer, as in `StoredOptimizer.chained_optimizer_settings`.
        has_expert_optimizer: whether experts have an optimizer of their own.
    """

    def __init__(
        self, checkpoint: CheckpointView, chain: Sequence[Mapping[str, Any]], has_expert_optimizer: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._chain = chain
        self._has_expert_optimizer = has_expert_optimizer
        state = checkpoint.optimizer.state()
        self._kinds: dict[str, list[str]] = {name: [] for name in state.names()}
        for kind in state.carried_kinds:
            for name in state.names(kind) if kind != FP32_PARAM else ():
                self._kinds[name].append(kind)

    def state_of_rank(self, parameters: Sequence[str], part: Part) -> Any:
        """Return the rank's entry `optimizer`: the state of a single optimizer, or a list of several.

        Args:
            parameters: the rank's parameters, in the order of registration.
            part: returns the rank's part of a tensor.
        """
        trained = [name for name in parameters if name in self._kinds]
        entries = [
            self._entry(child, [name for name in trained if self._child_of(name) == number], part)
            for number, child in enumerate(self._chain)
        ]
        return entries if len(entries) > 1 else entries[0]

    def _entry(self, child: Mapping[str, Any], names: Sequence[str], part: Part) -> dict[str, Any]:
        inner = inner_state(child)
        by_group = self._group_names(names, inner["param_groups"])
        step = (inner.get("state") or {}).get("common_step")
        own_step = {} if step is None else {"step": torch.tensor(float(step))}
        numbered = {name: number for number, name in enumerate(name for group in by_group for name in group)}
        written = {
            "state": {
                number: {**own_step, **{kind: part(kind, name) for kind in self._kinds[name]}}
                for name, number in numbered.items()
                if self._kinds[name]
            },
            "param_groups": [
                {**group, "params": [numbered[name] for name in group_names]}
                for group, group_names in zip(inner["param_groups"], by_group, strict=True)
            ],
        }
        if "optimizer" not in child:
            return written
        masters = [
            [part(FP32_PARAM, name) for name in group_names if not self._is_own_master(name)]
            for group_names in by_group
        ]
        scaler = {"grad_scaler": child["grad_scaler"]} if "grad_scaler" in child else {}
        return {"optimizer": written, MASTERS: masters, **scaler}

    def _group_names(self, names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Return the parameters of each group.

        Raises:
            UnsupportedCheckpointError: see `group_that_holds`.
        """
        if len(groups) == 1:
            return [list(names)]
        by_group: list[list[str]] = [[] for _ in groups]
        for name in names:
            shape = named_tensor(self._checkpoint, WEIGHT, name).shape
            by_group[group_that_holds(name, shape, groups, self._checkpoint.job.arguments())].append(name)
        return by_group

    def _is_own_master(self, name: str) -> bool:
        tensor = self._checkpoint.logical_tensor(WEIGHT, name)
        return tensor is not None and tensor.dtype == "float32"

    def _child_of(self, name: str) -> int:
        """Return the optimizer that updates a parameter, by its kinds of state and whether it is an expert's."""
        numbers = [number for number, child in enumerate(self._chain) if self._steps(child, name)]
        if len(numbers) == 1:
            return numbers[0]
        raise UnsupportedCheckpointError(
            "the chained optimizer that updates a parameter is unknown",
            found=f"{len(numbers)} that may",
            where=name,
            hint="use --to torch_dist",
        )

    def _steps(self, child: Mapping[str, Any], name: str) -> bool:
        groups = inner_state(child)["param_groups"]
        experts = any(group.get("is_expert_parallel") for group in groups)
        if experts != (self._has_expert_optimizer and is_of_experts(name)):
            return False
        return any(rule_of(group) == rule_that_keeps(self._kinds[name]) for group in groups)
