"""Optimizers of whole parameters, equal on all data-parallel ranks: Adam, Muon, Lion.

Attributes used, present from core_v0.7.0 to 0.19.2 in megatron/core/optimizer/optimizer.py: `float16_groups` and
`fp32_from_float16_groups` of Float16OptimizerWithFloat16Params; `optimizer.param_groups`, `optimizer.state` and
`grad_scaler` of it and of FP32Optimizer, whose masters are the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from mcore_ckpt_ext.megatron.live.model import LiveParameter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard
from mcore_ckpt_ext.megatron.live.optimizer_adapters.inner_optimizers import kept_by
from mcore_ckpt_ext.megatron.live.optimizer_adapters.offloaded import set_step
from mcore_ckpt_ext.megatron.live.optimizer_adapters.plain import PlainAdapter, find_live_parameter
from mcore_ckpt_ext.model_space.slices import Slice


class UndistributedAdapter(PlainAdapter):
    """Adapter for masters and moments that every data-parallel rank holds whole."""

    kind = "whole masters of whole parameters"

    def __init__(self, optimizer: Any) -> None:
        """Args: the Float16OptimizerWithFloat16Params or FP32Optimizer; `kept_by` supports its inner one."""
        super().__init__(optimizer)
        self._kinds = kept_by(optimizer.optimizer) or ()

    @property
    def is_first_replica(self) -> bool:
        """True: every rank reports its model, as ranks of one stage cannot be distinguished here."""
        return True

    def shards(self, live: Mapping[int, LiveParameter]) -> Iterator[LiveShard]:
        """Yield the shards of this rank."""
        for group in self.param_groups:
            for master in group["params"]:
                live_parameter = find_live_parameter(live, self._parameters.get(id(master), master))
                yield LiveShard(live_parameter, Slice.whole(live_parameter.regions), self._kinds, self)

    def share_weights(self) -> None:
        """Do nothing: every rank has written all weights."""

    def finish(self, groups: Sequence[Mapping[str, Any]], scaler: Mapping[str, Any] | None) -> None:
        """Set the parameter groups' values, the number of steps, and the gradient scaler's state."""
        super().finish(groups, scaler)
        if steps := [int(group["step"]) for group in groups if "step" in group]:  # Muon has no step
            set_step(self._optimizer.optimizer, max(steps))

    @cached_property
    def _parameters(self) -> dict[int, torch.Tensor]:
        """The model's parameter of each fp32 copy, by the copy's `id`."""
        pairs = zip(
            getattr(self._optimizer, "float16_groups", []),
            getattr(self._optimizer, "fp32_from_float16_groups", []),
            strict=True,
        )
        return {
            id(master): parameter
            for parameters, masters in pairs
            for parameter, master in zip(parameters, masters, strict=True)
        }

    @cached_property
    def _masters(self) -> dict[int, torch.Tensor]:
        """The master of each parameter, by the parameter's `id`."""
        masters = [master for group in self.param_groups for master in group["params"]]
        return {id(self._parameters.get(id(master), master)): master for master in masters}

    @override
    def _step_tensor(self, shard: LiveShard) -> torch.Tensor:
        return self._masters[id(shard.live.parameter)]
