"""Optimizers of whole parameters, the same on all data-parallel ranks: Adam, Muon, Lion without distribution.

Attributes used, present from core_v0.7.0 to 0.19.2 in megatron/core/optimizer/optimizer.py: `float16_groups` and
`fp32_from_float16_groups` of Float16OptimizerWithFloat16Params; `optimizer.param_groups`, `optimizer.state` and
`grad_scaler` of that and FP32Optimizer, whose masters are the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ
from mcore_ckpt_ext.online.homes.home import LiveShard
from mcore_ckpt_ext.online.homes.offloaded import set_step
from mcore_ckpt_ext.online.homes.plain import PlainHome, described
from mcore_ckpt_ext.online.live_model import LiveParameter
from mcore_ckpt_ext.optimizers.description import MOMENTUM
from mcore_ckpt_ext.optimizers.groups import keeps_nothing


def kept_by(optimizer: Any) -> tuple[str, ...] | None:
    """What a plain optimizer keeps of each parameter, every one in the parameter's shape; None where it is not known.

    Sources: `TensorParallelMuon` (megatron/core/optimizer/muon.py, core_v0.16.0, 0.16.1; emerging_optimizers.py since
    0.17) and `Lion` (emerging_optimizers, 0.3.0). Others of that package may have Adam's settings but keep something
    else (SOAP), or Muon's and more (AdaptiveMuon). torch's SGD keeps nothing without a momentum (torch/optim/sgd.py,
    2.1 to 2.13), Transformer Engine's does (`get_momentums`, transformer_engine/pytorch/optimizers/fused_sgd.py, 2.20).
    """
    kind = type(optimizer)
    if is_sgd(optimizer):
        plain = isinstance(optimizer, torch.optim.SGD) and keeps_nothing(optimizer.param_groups)
        return () if plain else (MOMENTUM,)
    if kind.__name__ == "TensorParallelMuon":
        return (MOMENTUM,)
    if kind.__name__ == "Lion":
        return (EXP_AVG,)
    foreign = any(known.__module__.startswith("emerging_optimizers.") for known in kind.__mro__)
    is_adam = all("betas" in group and "eps" in group for group in optimizer.param_groups)
    return (EXP_AVG, EXP_AVG_SQ) if is_adam and not foreign else None


def is_sgd(optimizer: Any) -> bool:
    """Whether a plain optimizer is SGD: torch's, or the fused one of Transformer Engine and Apex."""
    return isinstance(optimizer, torch.optim.SGD) or type(optimizer).__name__ == "FusedSGD"


class UndistributedHome(PlainHome):
    """The home of masters and moments that every data-parallel rank holds whole."""

    kind = "whole masters of whole parameters"

    def __init__(self, optimizer: Any) -> None:
        """Args: the Float16OptimizerWithFloat16Params or FP32Optimizer, over what `kept_by` knows."""
        super().__init__(optimizer)
        self._kinds = kept_by(optimizer.optimizer) or ()

    @property
    def is_first_replica(self) -> bool:
        """Every rank reports the same; those of one stage cannot be told apart here."""
        return True

    def shards(self, live: Mapping[int, LiveParameter]) -> Iterator[LiveShard]:
        """What this rank holds."""
        for group in self.param_groups:
            for master in group["params"]:
                own = described(live, self._parameters.get(id(master), master))
                yield LiveShard(own, Slice.whole(own.regions), self, self._kinds)

    def share_weights(self) -> None:
        """Every rank has written all of them."""

    def finish(self, groups: Sequence[Mapping[str, Any]], scaler: Mapping[str, Any] | None) -> None:
        """Take over the parameter groups' values, in the order of `param_groups`, and the gradient scaler's state."""
        for group, values in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        if steps := [int(group["step"]) for group in groups if "step" in group]:  # Muon counts none
            set_step(self._optimizer.optimizer, max(steps))
        if scaler is not None and getattr(self._optimizer, "grad_scaler", None):
            self._optimizer.grad_scaler.load_state_dict(scaler)

    @cached_property
    def _parameters(self) -> dict[int, torch.Tensor]:
        """The model's parameter of each fp32 copy, by the copy's `id`."""
        pairs = zip(
            getattr(self._optimizer, "float16_groups", []),
            getattr(self._optimizer, "fp32_from_float16_groups", []),
            strict=True,
        )
        return {id(master): own for owns, masters in pairs for own, master in zip(owns, masters, strict=True)}

    @cached_property
    def _masters(self) -> dict[int, torch.Tensor]:
        """The master of each parameter, by the parameter's `id`."""
        masters = [master for group in self.param_groups for master in group["params"]]
        return {id(self._parameters.get(id(master), master)): master for master in masters}

    @override
    def _stepped(self, shard: LiveShard) -> torch.Tensor:
        return self._masters[id(shard.live.parameter)]
