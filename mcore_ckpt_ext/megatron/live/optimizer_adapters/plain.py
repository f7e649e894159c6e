"""Base of the adapters for Megatron's optimizers: masters are fp32 tensors of an inner optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_ckpt_ext.errors import ModelMismatchError
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING, MasterCheck
from mcore_ckpt_ext.megatron.live.model import LiveParameter, quantization_check
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard


class PlainAdapter(ABC):
    """The part of an `OptimizerAdapter` that does not depend on how data-parallel ranks share parameters."""

    def __init__(self, optimizer: Any) -> None:
        """Args: Megatron's optimizer; its inner optimizer (`optimizer`) has the state."""
        self._optimizer = optimizer

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """The parameter groups, in the optimizer's own order."""
        groups: Sequence[dict[str, Any]] = self._optimizer.optimizer.param_groups
        return groups

    def room(self, shard: LiveShard) -> torch.Tensor:
        """Allocate uninitialized fp32 memory on the shard's device, for `set_master` and `keep`."""
        return torch.empty_like(self._kept_masters(shard), dtype=torch.float32, requires_grad=False).view(-1)

    def master(self, shard: LiveShard) -> torch.Tensor:
        """Return the masters in fp32; do not write to them."""
        return self._kept_masters(shard).detach().view(-1)

    def master_check(self, shard: LiveShard) -> MasterCheck | None:
        """Return the comparison of masters and weights; None if every pair is valid, as with remainders."""
        return quantization_check(shard.live.parameter) or BY_ROUNDING

    def round_masters(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """Cast to the weights' dtype (`_copy_main_params_to_model_params`)."""
        return values.to(shard.weight.dtype)

    def set_master(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """Take fp32 masters: swap the memory, which costs nothing, if no other tensor uses the old memory."""
        kept = self._kept_masters(shard)
        alike = (kept.dtype, kept.device) == (values.dtype, values.device)
        if alike and kept is not shard.live.parameter and self._may_move(kept):
            old = kept.detach().view(-1)
            kept.data = values.view(kept.shape)
            return old
        with torch.no_grad():
            self.master(shard).copy_(values)
        return values

    def keep(self, shard: LiveShard, kind: str, values: torch.Tensor) -> None:
        """Take fp32 moments; `values` must not be changed afterwards."""
        state = self._optimizer.optimizer.state
        stepped = self._step_tensor(shard)
        state[stepped] = {**state.get(stepped, {}), kind: values.view(stepped.shape)}

    def finish(self, groups: Sequence[Mapping[str, Any]], scaler: Mapping[str, Any] | None) -> None:
        """Set the parameter groups' values, in the order of `param_groups`, and the gradient scaler's state."""
        for group, values in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        if scaler is not None and getattr(self._optimizer, "grad_scaler", None):
            self._optimizer.grad_scaler.load_state_dict(scaler)

    def _may_move(self, kept: torch.Tensor) -> bool:
        """Return True if no other tensor uses the masters' memory, so that it may be swapped."""
        return is_alone(kept)

    @abstractmethod
    def _step_tensor(self, shard: LiveShard) -> torch.Tensor:
        """Return the tensor in the inner optimizer's parameter groups."""

    def _kept_masters(self, shard: LiveShard) -> torch.Tensor:
        """Return the masters: the tensor that is stepped is an fp32 copy of the weights, or fp32 weights."""
        return self._step_tensor(shard)


def is_alone(tensor: torch.Tensor) -> bool:
    """Return True if a tensor fills its storage and no other tensor uses it; False if unknown."""
    uses = getattr(torch._C, "_storage_Use_Count", None)  # since torch 2.1; its CUDA graphs use it (cudagraph_trees.py)
    if uses is None or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    lone = torch.empty(1, device="cpu")
    # Both counts include the Python object that reads them.
    return bool(uses(tensor.untyped_storage()._cdata) == uses(lone.untyped_storage()._cdata))


def find_live_parameter(live: Mapping[int, LiveParameter], parameter: torch.Tensor) -> LiveParameter:
    """Return the description of a parameter, found by `id`.

    Raises:
        ModelMismatchError: the parameter is trained but never stored.
    """
    if (live_parameter := live.get(id(parameter))) is None:
        raise ModelMismatchError(
            "the model trains a parameter that its own sharded state dict does not list",
            found=f"a parameter of shape {tuple(parameter.shape)}",
        )
    return live_parameter
