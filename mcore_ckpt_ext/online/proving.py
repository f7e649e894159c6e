"""The proof inside of a live job: every master rounds to its weight, bit for bit (see `layout.proof`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.layout.proof import Proof
from mcore_ckpt_ext.online.homes.home import LiveShard
from mcore_ckpt_ext.online.live_job import LiveJob

_BLOCK = 1 << 24
# Elements that a processor's cache holds: rounding them and comparing costs one pass over the memory.
_CACHED = 1 << 17


def prove(shard: LiveShard, master: torch.Tensor, checkpoint: Checkpoint) -> None:
    """Prove a shard's masters against the live weights.

    Raises:
        ProofError: one does not round to its weight.
    """
    for begin in range(0, master.numel(), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        first = shard.slice.start + begin

        def where(position: int, first: int = first) -> str:
            return f"{shard.name}, element {first + position} of this rank's part, {checkpoint.folder}"

        instead = ": resume from another iteration, or with --no-load-optim and a fresh optimizer"
        checkpoint.proof.check(master[part], shard.weight[part], where, instead)


@dataclass(frozen=True)
class Unproven:
    """A parameter some of whose masters are not those of its live weights, as one rank sees it."""

    name: str
    position: int
    master: float
    weight: float

    def __str__(self) -> str:
        return f"{self.name}, element {self.position}: master {self.master!r}, weight {self.weight!r}"


def unproven(chunks: Sequence[Any], optimizer: Any, weaker: Proof | None = None) -> list[Unproven]:
    """Parameters of the live optimizer whose masters do not round to the live weights; touches no checkpoint.

    It is how any load is proven, the framework's too. Optimizers of a kind that is not filled are passed over.

    Args:
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer.
        weaker: the proof of the checkpoint that it was filled from, where that is all that masters can promise.
    """
    try:
        job = LiveJob(chunks, optimizer)
    except CheckpointError:
        return []
    found: dict[str, Unproven] = {}
    for shard in job.shards:
        if shard.name not in found and (mismatch := _first_mismatch(shard, weaker)) is not None:
            found[shard.name] = mismatch
    return list(found.values())


def _first_mismatch(shard: LiveShard, weaker: Proof | None) -> Unproven | None:
    proof, weight = shard.home.proof(shard), shard.weight
    if proof is None:
        return None
    master = shard.home.master(shard)
    if master.data_ptr() == weight.data_ptr():
        return None  # fp32 training: they are one
    for begin in range(0, master.numel(), _CACHED):
        part = slice(begin, begin + _CACHED)
        if torch.equal(master[part].to(weight.dtype), weight[part]):
            continue
        mismatch = (weaker or proof).first_mismatch(master[part], weight[part])
        if mismatch is not None:  # NaN equals itself here
            at = shard.slice.start + begin + mismatch.position
            return Unproven(shard.name, at, mismatch.master, mismatch.weight)
    return None
