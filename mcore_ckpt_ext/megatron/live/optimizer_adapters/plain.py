"""Base of the adapters for Megatron's optimizers: masters are fp32 tensors, and an inner optimizer steps them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_ckpt_ext.errors import ModelMismatchError
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING, Proof
from mcore_ckpt_ext.megatron.live.model import LiveParameter, quantisation
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard


class PlainAdapter(ABC):
    """The part of a `OptimizerAdapter` that does not depend on how parameters are spread over data-parallel ranks."""

    def __init__(self, optimizer: Any) -> None:
        """Args: Megatron's optimizer, around the inner one (`optimizer`) that has the state."""
        self._optimizer = optimizer

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """The parameter groups, in the optimizer's own order."""
        groups: Sequence[dict[str, Any]] = self._optimizer.optimizer.param_groups
        return groups

    def room(self, shard: LiveShard) -> torch.Tensor:
        """Uninitialised fp32 memory where the shard is stepped, for `set_master` and `keep`."""
        return torch.empty_like(self._kept(shard), dtype=torch.float32, requires_grad=False).view(-1)

    def master(self, shard: LiveShard) -> torch.Tensor:
        """The masters in fp32; to be read only."""
        return self._kept(shard).detach().view(-1)

    def proof(self, shard: LiveShard) -> Proof | None:
        """How masters that are kept like this are proven; None where any pair of both is right, as with remainders."""
        return quantisation(shard.live.parameter) or BY_ROUNDING

    def rounded(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """A plain cast (`_copy_main_params_to_model_params`)."""
        return values.to(shard.weight.dtype)

    def set_master(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """Take over fp32 masters: by exchanging memory, which costs nothing, where nobody else looks at the old."""
        kept = self._kept(shard)
        alike = (kept.dtype, kept.device) == (values.dtype, values.device)
        if alike and kept is not shard.live.parameter and self._may_move(kept):
            old = kept.detach().view(-1)
            kept.data = values.view(kept.shape)
            return old
        with torch.no_grad():
            self.master(shard).copy_(values)
        return values

    def keep(self, shard: LiveShard, kind: str, values: torch.Tensor) -> None:
        """Take over fp32 moments; `values` must not be changed afterwards."""
        state, stepped = self._optimizer.optimizer.state, self._stepped(shard)
        state[stepped] = {**state.get(stepped, {}), kind: values.view(stepped.shape)}

    def _may_move(self, kept: torch.Tensor) -> bool:
        """Whether masters are alone in their memory, so that no other tensor is left with what was there before."""
        return is_alone(kept)

    @abstractmethod
    def _stepped(self, shard: LiveShard) -> torch.Tensor:
        """The tensor in the inner optimizer's parameter groups."""

    def _kept(self, shard: LiveShard) -> torch.Tensor:
        """The masters where they are kept: what is stepped is an fp32 copy of the weights, or fp32 weights."""
        return self._stepped(shard)


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its memory, and no other tensor has any of it; where torch cannot tell, it is not."""
    uses = getattr(torch._C, "_storage_Use_Count", None)  # since torch 2.1; as its CUDA graphs ask (cudagraph_trees.py)
    if uses is None or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    lone = torch.empty(1, device="cpu")
    # Both are counted with the Python object through which they are looked at.
    return bool(uses(tensor.untyped_storage()._cdata) == uses(lone.untyped_storage()._cdata))


def described(live: Mapping[int, LiveParameter], parameter: torch.Tensor) -> LiveParameter:
    """The model's parameter, of those by `id`.

    Raises:
        ModelMismatchError: it is trained but never stored.
    """
    if (found := live.get(id(parameter))) is None:
        raise ModelMismatchError(
            "the model trains a parameter that its own sharded state dict does not list",
            found=f"a parameter of shape {tuple(parameter.shape)}",
        )
    return found
