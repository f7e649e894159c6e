"""Evidence from samples whether live masters match the live weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt_ext.collectives import gather
from mcore_ckpt_ext.megatron.live.master_check import sample_matches
from mcore_ckpt_ext.megatron.live.model import Chunks, parameters_as_named
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import optimizer_adapters_of


@dataclass
class MasterEvidence:
    """Names of parameters whose masters match their weights, and of parameters whose masters differ.

    Inconclusive parameters are in neither list: constant ones, such as new biases and norms, and parameters of which
    only some elements differ, such as weights that have hardly been trained.
    """

    matching: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    @property
    def is_contradictory(self) -> bool:
        """True if some masters match the live weights, so that the weights are loaded, and others do not."""
        return bool(self.matching and self.differing)

    @classmethod
    def from_all_ranks(cls, own: MasterEvidence) -> MasterEvidence:
        """Return the combined evidence of all ranks. Collective."""
        of_ranks = gather(own)
        return cls(
            [name for evidence in of_ranks for name in evidence.matching],
            [name for evidence in of_ranks for name in evidence.differing],
        )

    @classmethod
    def of(cls, chunks: Chunks, optimizer: Any) -> MasterEvidence:
        """Return the evidence of this rank.

        Args:
            chunks: the unwrapped model chunks.
            optimizer: the live optimizer.

        Raises:
            UnsupportedCheckpointError: this package does not support the kind of optimizer.
        """
        evidence = cls()
        live = parameters_as_named(chunks)
        for shard in (shard for adapter in optimizer_adapters_of(optimizer) for shard in adapter.shards(live)):
            master_check = shard.adapter.master_check(shard)
            matches = None if master_check is None else sample_matches(shard, shard.adapter.master(shard), master_check)
            if matches is not None:
                (evidence.matching if matches else evidence.differing).append(shard.name)
        return evidence
