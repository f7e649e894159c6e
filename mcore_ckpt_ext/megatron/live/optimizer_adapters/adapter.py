"""The protocol of adapters to live optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mcore_ckpt_ext.layout.master_check import MasterCheck
from mcore_ckpt_ext.megatron.live.model import LiveParameter, quantization_check
from mcore_ckpt_ext.model_space.slices import Slice


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a parameter in one rank's optimizer; hashable.

    Attributes:
        live: the parameter.
        slice: the elements of it that the optimizer holds.
        kinds: the kinds of state that are kept for each element, without the master.
    """

    live: LiveParameter
    slice: Slice
    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        """The parameter's name in model space."""
        return self.live.regions[0].name

    @property
    def weight(self) -> torch.Tensor:
        """The live weight's elements, 1-D; a view, unless the weight is quantized."""
        parameter = self.live.parameter
        plain = parameter.detach() if quantization_check(parameter) is None else parameter.dequantize().detach()
        return plain.reshape(-1)[self.slice.start : self.slice.stop]


@dataclass(frozen=True, eq=False)
class LiveShard(Shard):
    """A shard of this rank's live optimizer.

    Attributes:
        adapter: the adapter of the optimizer that holds it.
    """

    adapter: OptimizerAdapter


class OptimizerAdapter(Protocol):
    """One optimizer of a live job: its share of the parameters, and access to their masters and moments.

    All tensors of a shard are 1-D and have `shard.slice.numel` elements.
    """

    @property
    def kind(self) -> str:
        """How masters are kept, in words; the same on all ranks that have such an adapter."""

    @property
    def is_first_replica(self) -> bool:
        """True if no other rank reports the same about the model."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The parameter groups, in the optimizer's own order."""

    def shards(self, live: Mapping[int, LiveParameter]) -> Iterator[LiveShard]:
        """Yield the shards of this rank.

        Args:
            live: the model's parameters by `id`.

        Raises:
            ModelMismatchError: a parameter is trained but never stored, so that no checkpoint can have it.
            UnsupportedCheckpointError: the optimizer's state is not of the expected kind.
        """

    def room(self, shard: LiveShard) -> torch.Tensor:
        """Allocate uninitialized fp32 memory on the shard's device, for `set_master` and `keep`."""

    def master(self, shard: LiveShard) -> torch.Tensor:
        """Return the masters in fp32; do not write to them."""

    def master_check(self, shard: LiveShard) -> MasterCheck | None:
        """Return the comparison of masters and weights; None if every pair is valid, as with remainders."""

    def round_masters(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """Return the weights that this optimizer would write for fp32 masters, 1-D, in the weights' dtype.

        Optimizers differ if a master lies halfway between two weights.
        """

    def share_weights(self) -> None:
        """Send the weights whose masters this rank holds to all data-parallel ranks. Collective."""

    def set_master(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """Take fp32 masters.

        Args:
            shard: the shard.
            values: memory from `room`; it must not be changed afterwards.

        Returns:
            Memory of the same size that the caller may use: `values`, if copied, or the memory of the old masters.
        """

    def keep(self, shard: LiveShard, kind: str, values: torch.Tensor) -> None:
        """Take fp32 moments; `values` must not be changed afterwards."""

    def finish(self, groups: Sequence[Mapping[str, Any]], scaler: Mapping[str, Any] | None) -> None:
        """Set the parameter groups' values, in the order of `param_groups`, and the gradient scaler's state.

        Call it last: the step makes the state consistent again.
        """
