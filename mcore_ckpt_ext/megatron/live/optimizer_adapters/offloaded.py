"""DistributedOptimizer over HybridDeviceOptimizer, which steps shards on the CPU.

The flag is ``--optimizer-cpu-offload``.

Attributes used, present from core_v0.12.1 to 0.19.2 and in the development head of August 2026, in
megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py: `sub_optimizers`, `param_to_inner_param`, `param_groups`,
`_sync_hdo_param_groups_to_sub_optimizers`, `_sync_sub_optimizers_state_to_hdo`, `offload_fraction`.
A sub-optimizer steps the *inner* parameter, an fp32 copy of the bf16 shard on the sub-optimizer's device. Its state has
the moments and, with torch's Adam, the step. The outer optimizer has references to all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard
from mcore_ckpt_ext.megatron.live.optimizer_adapters.distributed import DistributedAdapter

_STEP = "step"


class OffloadedAdapter(DistributedAdapter):
    """Adapter for masters and moments that `HybridDeviceOptimizer` keeps partly on the CPU."""

    @property
    @override
    def kind(self) -> str:
        return f"CPU offload of {self._hybrid.offload_fraction:g}"

    @override
    def keep(self, shard: LiveShard, kind: str, values: torch.Tensor) -> None:
        inner = self._kept_masters(shard)
        state = self._steppers[id(inner)].state
        state[inner] = {**state.get(inner, {}), kind: values.view(inner.shape)}

    def finish(self, groups: Sequence[Mapping[str, Any]], scaler: Mapping[str, Any] | None) -> None:
        """Set the groups, the step of every sub-optimizer, and the gradient scaler.

        The outer groups are copied into those of the sub-optimizers before every step. Stock Megatron leaves a step in
        them when it loads, which would reset FusedAdam's step each time.
        """
        hybrid = self._hybrid
        step = max((int(group[_STEP]) for group in groups if _STEP in group), default=0)
        for group, values in zip(hybrid.param_groups, groups, strict=True):
            group.pop(_STEP, None)
            group.update({key: value for key, value in values.items() if key not in ("params", _STEP)})
        hybrid._sync_hdo_param_groups_to_sub_optimizers()
        for stepper in hybrid.sub_optimizers:
            set_step(stepper, step)
        hybrid._sync_sub_optimizers_state_to_hdo()
        if scaler is not None and self._optimizer.grad_scaler:
            self._optimizer.grad_scaler.load_state_dict(scaler)

    @property
    def _hybrid(self) -> Any:
        return self._optimizer.optimizer

    @cached_property
    def _steppers(self) -> dict[int, Any]:
        """The sub-optimizer of each inner parameter, by the parameter's `id`."""
        return {
            id(parameter): stepper
            for stepper in self._hybrid.sub_optimizers
            for group in stepper.param_groups
            for parameter in group["params"]
        }

    @override
    def _may_move(self, kept: torch.Tensor) -> bool:
        """Return False: masters may lie in pinned memory, which copies to and from the device rely on."""
        return False

    def _kept_masters(self, shard: LiveShard) -> torch.Tensor:
        inner: torch.Tensor = self._hybrid.param_to_inner_param[self._step_tensor(shard)]
        return inner


def set_step(optimizer: Any, step: int) -> None:
    """Set the number of steps that a plain optimizer has made.

    torch's Adam counts steps for each parameter, in a tensor on the parameter's device if its kernel is fused
    (`_init_group`, torch/optim/adam.py, 2.1 to 2.13); the Adam of Apex and Transformer Engine counts in the parameter
    group.
    """
    for group in optimizer.param_groups:
        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            group[_STEP] = step
            continue
        group.pop(_STEP, None)
        for parameter in group["params"]:
            on_device = group.get("fused") or group.get("capturable")
            device = parameter.device if on_device else torch.device("cpu")
            optimizer.state[parameter][_STEP] = torch.tensor(float(step), dtype=torch.float32, device=device)
