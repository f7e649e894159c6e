"""What the homes of Megatron's optimizers share: masters are fp32 tensors, and an inner optimizer steps them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_ckpt_ext.errors import ModelMismatchError
from mcore_ckpt_ext.layout.proof import BY_ROUNDING, Proof
from mcore_ckpt_ext.online.homes.home import LiveShard
from mcore_ckpt_ext.online.live_model import LiveParameter, quantisation


class PlainHome(ABC):
    """The part of a `Home` that does not depend on how parameters are spread over data-parallel ranks."""

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

    def set_master(self, shard: LiveShard, values: torch.Tensor) -> None:
        """Copy fp32 masters; `values` stays the caller's."""
        with torch.no_grad():
            self.master(shard).copy_(values)

    def keep(self, shard: LiveShard, kind: str, values: torch.Tensor) -> None:
        """Take over fp32 moments; `values` belongs to the home afterwards."""
        state, stepped = self._optimizer.optimizer.state, self._stepped(shard)
        state[stepped] = {**state.get(stepped, {}), kind: values.view(stepped.shape)}

    @abstractmethod
    def _stepped(self, shard: LiveShard) -> torch.Tensor:
        """The tensor in the inner optimizer's parameter groups."""

    def _kept(self, shard: LiveShard) -> torch.Tensor:
        """The masters where they are kept: what is stepped is an fp32 copy of the weights, or fp32 weights."""
        return self._stepped(shard)


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
