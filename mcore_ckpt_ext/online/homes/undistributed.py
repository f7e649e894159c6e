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

from mcore_ckpt_ext.errors import ModelMismatchError
from mcore_ckpt_ext.layout.proof import BY_ROUNDING, Proof
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ
from mcore_ckpt_ext.online.homes.home import LiveShard
from mcore_ckpt_ext.online.homes.offloaded import set_step
from mcore_ckpt_ext.online.live_model import LiveParameter, quantisation
from mcore_ckpt_ext.optimizers.description import MOMENTUM


def kept_by(optimizer: Any) -> tuple[str, ...] | None:
    """What a plain optimizer keeps of each parameter, every one in the parameter's shape; None where it is not known.

    Sources: `TensorParallelMuon` (megatron/core/optimizer/muon.py, core_v0.16.0, 0.16.1; emerging_optimizers.py since
    0.17) and `Lion` (emerging_optimizers, 0.3.0). Others of that package may have Adam's settings but keep something
    else (SOAP), or Muon's and more (AdaptiveMuon).
    """
    kind = type(optimizer)
    if kind.__name__ == "TensorParallelMuon":
        return (MOMENTUM,)
    if kind.__name__ == "Lion":
        return (EXP_AVG,)
    foreign = any(known.__module__.startswith("emerging_optimizers.") for known in kind.__mro__)
    is_adam = all("betas" in group and "eps" in group for group in optimizer.param_groups)
    return (EXP_AVG, EXP_AVG_SQ) if is_adam and not foreign else None


class UndistributedHome:
    """The home of masters and moments that every data-parallel rank holds whole."""

    kind = "whole masters of whole parameters"

    def __init__(self, optimizer: Any) -> None:
        """Args: the Float16OptimizerWithFloat16Params or FP32Optimizer, over what `kept_by` knows."""
        self._optimizer = optimizer
        self._kinds = kept_by(optimizer.optimizer) or ()

    @property
    def is_first_replica(self) -> bool:
        """Every rank reports the same; those of one stage cannot be told apart here."""
        return True

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """The parameter groups, in the optimizer's own order."""
        groups: Sequence[dict[str, Any]] = self._optimizer.optimizer.param_groups
        return groups

    def shards(self, live: Mapping[int, LiveParameter]) -> Iterator[LiveShard]:
        """What this rank holds."""
        for group in self.param_groups:
            for master in group["params"]:
                parameter = self._parameters.get(id(master), master)
                described = live.get(id(parameter))
                if described is None:
                    raise ModelMismatchError(
                        "the model trains a parameter that its own sharded state dict does not list",
                        found=f"a parameter of shape {tuple(parameter.shape)}",
                    )
                yield LiveShard(described, Slice.whole(described.regions), self, self._kinds)

    def room(self, shard: LiveShard) -> torch.Tensor:
        """Uninitialised fp32 memory where the shard is stepped, for `set_master` and `keep`."""
        return torch.empty_like(self._master(shard), dtype=torch.float32, requires_grad=False).view(-1)

    def master(self, shard: LiveShard) -> torch.Tensor:
        """The masters in fp32; to be read only."""
        return self._master(shard).detach().view(-1)

    def proof(self, shard: LiveShard) -> Proof | None:
        """How masters that are kept like this are proven; None where any pair of both is right, as with remainders."""
        return quantisation(shard.live.parameter) or BY_ROUNDING

    def rounded(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """A plain cast (`_copy_main_params_to_model_params`)."""
        return values.to(shard.weight.dtype)

    def share_weights(self) -> None:
        """Every rank has written all of them."""

    def set_master(self, shard: LiveShard, values: torch.Tensor) -> None:
        """Copy fp32 masters; `values` stays the caller's."""
        self.master(shard).copy_(values)

    def keep(self, shard: LiveShard, kind: str, values: torch.Tensor) -> None:
        """Take over fp32 moments; `values` belongs to the home afterwards."""
        state, master = self._optimizer.optimizer.state, self._master(shard)
        state[master] = {**state.get(master, {}), kind: values.view(master.shape)}

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

    def _master(self, shard: LiveShard) -> torch.Tensor:
        return self._masters[id(shard.live.parameter)]
