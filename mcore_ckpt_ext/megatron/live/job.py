"""One rank of a live job: its model and optimizer, and the summary that it sends to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mcore_ckpt_ext.errors import ModelMismatchError, format_ranks
from mcore_ckpt_ext.layout.weight_spec import WeightSpec
from mcore_ckpt_ext.megatron.live.model import (
    NEW,
    Chunks,
    NameFunction,
    held_among,
    live_names,
    model_tensors,
    registered_names,
    trained_names,
)
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import optimizer_adapters_of


class LiveJob:
    """The model and the optimizer of one rank, which a resume fills.

    Attributes:
        adapters: the adapters of its optimizers.
        shards: the shards that the checkpoint has.
        new: the shards of parameters that keep their initialization.
        summary: the summary for the other ranks.
    """

    def __init__(self, chunks: Chunks, optimizer: Any, spell: NameFunction = str) -> None:
        """Read the model and the optimizer.

        Args:
            chunks: the unwrapped model chunks.
            optimizer: the live optimizer.
            spell: maps live names to the checkpoint's.

        Raises:
            UnsupportedCheckpointError: this package does not fill this kind of optimizer.
            ModelMismatchError: see `OptimizerAdapter.shards`.
        """
        self.adapters = optimizer_adapters_of(optimizer)
        stored = model_tensors(chunks, spell)
        self._live = live = held_among(stored, chunks)
        held = [shard for adapter in self.adapters for shard in adapter.shards(live)]
        self.shards = [shard for shard in held if not shard.name.startswith(NEW)]
        self.new = [shard for shard in held if shard.name.startswith(NEW)]
        first = not self.adapters or any(adapter.is_first_replica for adapter in self.adapters)
        self.summary = RankSummary(
            names=live_names(stored) if first else [],
            trained=trained_names(chunks, live) if first else [],
            registered=[registered_names(chunk, live) for chunk in chunks] if first else [],
            kinds=frozenset(adapter.kind for adapter in self.adapters),
        )

    def weight_specs(self) -> dict[str, WeightSpec]:
        """Return the weights of this rank, for an optimizer that is stored without them.

        A parameter's own attributes show if tensor-parallel ranks share it, and along which axis
        (`set_tensor_model_parallel_attributes`, megatron/core/tensor_parallel/layers.py, core_v0.7.0 to 0.19.2).
        """
        specs: dict[str, WeightSpec] = {}
        for described in self._live.values():
            is_shared = bool(getattr(described.parameter, "tensor_model_parallel", False))
            axis = int(getattr(described.parameter, "partition_dim", 0)) if is_shared else None
            for name, tensor in described.tensors.items():
                parts = sum(region.name == name for region in described.regions)
                specs[name] = WeightSpec(tensor, axis, parts)
        return specs


@dataclass(frozen=True)
class RankSummary:
    """The summary that a rank sends before planning; only data-parallel rank 0 describes the model."""

    names: list[str]
    trained: list[str]
    registered: list[list[str]]
    kinds: frozenset[str]


def check_same_kinds(summaries: Sequence[RankSummary]) -> None:
    """Refuse ranks that keep their masters in different ways; a rank may lack a kind that another has.

    Raises:
        ModelMismatchError: two ranks were started with different options.
    """
    ranks_of: dict[frozenset[str], list[int]] = {}
    for rank, summary in enumerate(summaries):
        ranks_of.setdefault(summary.kinds, []).append(rank)
    ordered = sorted(ranks_of, key=len)
    if all(fewer <= more for fewer, more in pairwise(ordered)):
        return
    raise ModelMismatchError(
        "the ranks of this job have different kinds of optimizers",
        found="; ".join(f"{' and '.join(sorted(kinds))} on rank {format_ranks(ranks_of[kinds])}" for kinds in ordered),
        expected="the same on all ranks",
        hint="start all ranks with the same options (--optimizer-offload-fraction, --use-precision-aware-optimizer)",
    )
