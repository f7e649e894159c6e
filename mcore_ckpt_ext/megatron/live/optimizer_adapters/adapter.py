"""Protocol of the adapters to live optimizers of every kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mcore_ckpt_ext.layout.master_check import Proof
from mcore_ckpt_ext.megatron.live.model import LiveParameter, quantisation
from mcore_ckpt_ext.model_space.slices import Slice


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a parameter in one rank's optimizer; hashable.

    Attributes:
        live: the parameter.
        slice: the elements of it that are held.
        kinds: what is kept for each element beside the master.
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
        """The live weight's elements, 1-D; a view, unless it is quantised."""
        parameter = self.live.parameter
        plain = parameter.detach() if quantisation(parameter) is None else parameter.dequantize().detach()
        return plain.reshape(-1)[self.slice.start : self.slice.stop]


@dataclass(frozen=True, eq=False)
class LiveShard(Shard):
    """A shard of this rank's live optimizer.

    Attributes:
        adapter: the optimizer that holds it.
    """

    adapter: OptimizerAdapter


class OptimizerAdapter(Protocol):
    """One optimizer of a live job: its share of the parameters, and where their masters and moments are kept.

    All tensors of a shard are 1-D and have `shard.slice.numel` elements.
    """

    @property
    def kind(self) -> str:
        """The way in which masters are kept, in words; the same on all ranks that have such an adapter."""

    @property
    def is_first_replica(self) -> bool:
        """Whether no other rank reports the same about the model."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The parameter groups, in the optimizer's own order."""

    def shards(self, live: Mapping[int, LiveParameter]) -> Iterator[LiveShard]:
        """The shards of this rank.

        Args:
            live: the model's parameters by `id`.

        Raises:
            ModelMismatchError: a parameter is trained but never stored, so that no checkpoint can have it.
            UnsupportedCheckpointError: the optimizer keeps something other than its kind does.
        """

    def room(self, shard: LiveShard) -> torch.Tensor:
        """Uninitialised fp32 memory where the shard is stepped, for `set_master` and `keep`."""

    def master(self, shard: LiveShard) -> torch.Tensor:
        """The masters in fp32; to be read only."""

    def proof(self, shard: LiveShard) -> Proof | None:
        """How masters that are kept like this are proven; None where any pair of both is right, as with remainders."""

    def rounded(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """The weights that this optimizer would write for fp32 masters, 1-D, in the weights' dtype.

        Optimizers differ where a master lies halfway between two weights.
        """

    def share_weights(self) -> None:
        """Give all data-parallel ranks the weights of which this one holds the masters; collective."""

    def set_master(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """Take over fp32 masters.

        Args:
            shard: which.
            values: from `room`; they must not be changed afterwards.

        Returns:
            Memory for as many elements, which is the caller's: `values`, copied, or what held the old masters.
        """

    def keep(self, shard: LiveShard, kind: str, values: torch.Tensor) -> None:
        """Take over fp32 moments; `values` must not be changed afterwards."""

    def finish(self, groups: Sequence[Mapping[str, Any]], scaler: Mapping[str, Any] | None) -> None:
        """Take over the parameter groups' values, in the order of `param_groups`, and the gradient scaler's state.

        This comes last: with the step, everything is consistent again.
        """
