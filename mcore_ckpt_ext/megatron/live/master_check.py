"""The proof inside a live job: every master rounds to its weight, bit for bit (see `layout.master_check`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mcore_ckpt_ext.errors import CheckpointError, ProofError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING, Mismatch, Proof, bits_dtype, weaker_of
from mcore_ckpt_ext.megatron.live.model import LiveParameter, live_parameters, quantisation
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard, Shard
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import optimizer_adapters_of
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.optimizers.stored_scales import proof_at_stored_scales

_BLOCK = 1 << 24
_SAMPLE = 1024
STRETCH = 1 << 17
"""Elements that fit into a processor's cache: rounding and comparing them costs one pass over the memory."""


class Prover:
    """Proves masters against the live weights, while they are read and afterwards; safe to use from several threads.

    Args:
        masters: of each shard, 1-D.
        checkpoint: what they are read from.
    """

    def __init__(self, masters: Mapping[LiveShard, torch.Tensor], checkpoint: CheckpointView) -> None:
        self._masters, self._checkpoint = masters, checkpoint
        plain = {shard: shard.weight for shard in masters if quantisation(shard.live.parameter) is None}
        near = {shard: weight for shard, weight in plain.items() if weight.device == masters[shard].device}
        self._pairs = {shard: _Pair(masters[shard], weight) for shard, weight in near.items()}
        self._room = _Room()
        self._equal: list[tuple[LiveShard, int]] = []

    def on_read(self, shard: LiveShard, start: int, stop: int) -> None:
        """See whether masters that have just been read are equal to their weights when rounded, as no proof asks more.

        Others are left for `finish`, which knows how they are proven, and names those that are wrong.
        """
        pair = self._pairs.get(shard)
        if pair is not None and pair.rounds(start, stop, self._room):
            self._equal.append((shard, stop - start))

    def finish(self) -> None:
        """Prove what has not been seen to be equal, all of its shard.

        Raises:
            ProofError: a master does not round to its weight.
        """
        left = {shard: master.numel() for shard, master in self._masters.items()}
        for shard, count in self._equal:
            left[shard] -= count
        for shard, count in left.items():
            if count and not self._checkpoint.masters_are_derived(shard.name):
                try:
                    prove(shard, self._masters[shard], self._checkpoint)
                except ProofError as error:
                    if self._none_matches():
                        raise self._not_loaded(error) from error
                    raise

    def _none_matches(self) -> bool:
        """Whether no parameter of this rank matches its masters, constant ones aside, as in a freshly made model."""
        shown = [sample_matches(shard, master) for shard, master in self._masters.items()]
        return False in shown and True not in shown

    def _not_loaded(self, error: ProofError) -> ProofError:
        return ProofError(
            "the live weights are not those of the checkpoint: none equals its rounded master",
            found=error.found,
            expected="weights that are loaded before the optimizer",
            where=str(self._checkpoint.folder),
            hint="load the weights of the same checkpoint first",
        )


def prove(shard: Shard, master: torch.Tensor, checkpoint: CheckpointView) -> None:
    """Prove a shard's masters against the live weights, within their rounding where these are fp8 or fp4.

    Raises:
        ProofError: one does not round to its weight.
    """
    stored = proof_at_stored_scales(checkpoint, shard.live.tensors, checkpoint.proof, checkpoint.transfer)
    proof, weight = weaker_of(stored, quantisation(shard.live.parameter)), shard.weight
    for begin in range(0, master.numel(), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        first = shard.slice.start + begin

        def where(position: int, first: int = first) -> str:
            return f"{shard.name}, element {first + position} of this rank's part, {checkpoint.folder}"

        instead = ": resume from another iteration, or with --no-load-optim and a fresh optimizer"
        own = weight[part] if weight.device == master.device else weight[part].to(master.device)
        proof.check(master[part], own, where, instead)


def sample_matches(shard: LiveShard, master: torch.Tensor, proof: Proof = BY_ROUNDING) -> bool | None:
    """Whether the first elements of a shard's masters match its weights.

    Returns:
        None where they show nothing: the weight is constant there, as biases and norms begin, or only some of them
        differ, as where it has hardly been trained.
    """
    weight, master = shard.weight[:_SAMPLE], master[:_SAMPLE]
    if not weight.numel() or bool((weight == weight[0]).all()):
        return None
    if master.device != weight.device:
        weight = weight.to(master.device)
    with torch.no_grad():
        mismatch = weaker_of(proof, quantisation(shard.live.parameter)).first_mismatch(master, weight)
    if mismatch is None:
        return True
    return False if 2 * mismatch.count > master.numel() else None


@dataclass(frozen=True)
class LiveMismatch:
    """The first mismatch of a live parameter, as one rank sees it; its position counts in the whole parameter."""

    name: str
    first: Mismatch

    def __str__(self) -> str:
        first = self.first
        return f"{self.name}, element {first.position}: master {first.master!r}, weight {first.weight!r}"


def live_mismatches(
    chunks: Sequence[Any], optimizer: Any, weaker: Proof | None = None, every: int = 1
) -> list[LiveMismatch]:
    """Parameters of the live optimizer whose masters do not round to the live weights; touches no checkpoint.

    This is how any load is proven, the framework's included.
    It costs one pass over masters and weights: the pairs are the optimizer's own, and the model is asked to describe
    itself only where a name has to be given.

    Args:
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer.
        weaker: the proof of the checkpoint that it was filled from, where that is all that masters can promise.
        every: of what this rank holds of a parameter, look at one in so many stretches, each of `STRETCH`, and at the
            last one. What misplaces a parameter, or leaves it unset, cannot hide between them; damage within
            one stretch can.

    Raises:
        UnsupportedCheckpointError: the optimizer is of a kind that this package does not know.
        CheckpointError: one of them cannot be looked at, and those before it are as they should be.
    """
    adapters = optimizer_adapters_of(optimizer)
    pairs = {
        id(parameter): LiveParameter(parameter, (Region.whole(name, tuple(parameter.shape)),), {}, may_pad=False)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    }
    room = _Room()
    found: dict[int, LiveMismatch] = {}
    try:
        for shard in (shard for adapter in adapters for shard in adapter.shards(pairs)):
            number = id(shard.live.parameter)
            if number not in found and (mismatch := _first_mismatch(shard, weaker, room, every)) is not None:
                found[number] = mismatch
    except CheckpointError:
        if not found:
            raise
    return _named(found, chunks) if found else []


def _named(found: Mapping[int, LiveMismatch], chunks: Sequence[Any]) -> list[LiveMismatch]:
    """The same by the names that checkpoints use; a parameter that is never stored keeps its own."""
    live = live_parameters(chunks)
    return [
        replace(item, name=live[number].regions[0].name) if number in live else item for number, item in found.items()
    ]


def _first_mismatch(shard: LiveShard, weaker: Proof | None, room: _Room, every: int) -> LiveMismatch | None:
    proof = shard.adapter.proof(shard)
    if proof is None:
        return None
    # Whoever loaded them, live weights of few bits may have been quantised anew.
    proof, weight = weaker_of(proof, weaker or quantisation(shard.live.parameter)), shard.weight
    master = shard.adapter.master(shard)
    if master.data_ptr() == weight.data_ptr():
        return None  # fp32 training: they are one
    # A GPU is waited for once per block, so its blocks are large; a processor rounds what its cache holds.
    is_near = master.device.type == weight.device.type == "cpu"
    size, numel = STRETCH if is_near else _BLOCK, master.numel()
    pair = _Pair(master, weight) if master.device == weight.device else None
    for begin in range(0, numel, size):
        number, part = begin // size, slice(begin, min(begin + size, numel))
        if is_near and number % every and part.stop < numel:
            continue
        if pair is not None and pair.rounds(begin, part.stop, room):
            continue
        own = weight[part] if is_near else weight[part].to(master.device)
        mismatch = proof.first_mismatch(master[part], own)
        if mismatch is not None:
            position = shard.slice.start + begin + mismatch.position
            return LiveMismatch(shard.name, replace(mismatch, position=position))
    return None


class _Pair:
    """Masters and the weights beside them, 1-D on one device; seen so that comparing a stretch takes few calls."""

    def __init__(self, master: torch.Tensor, weight: torch.Tensor) -> None:
        self._master, self._weight = master, weight
        self._each = each = 8 // weight.dtype.itemsize
        in_words = weight.stride() == (1,) and not weight.storage_offset() % each
        self._words = weight[: weight.numel() // each * each].view(torch.int64) if in_words else None

    def rounds(self, start: int, stop: int, room: _Room) -> bool:
        """Whether masters from the first to below the second round to their weights, bit for bit."""
        numel, each = stop - start, self._each
        kept, words = room.of(self._weight, numel)
        kept[:numel].copy_(self._master[start:stop])
        # The widest whole numbers that weights can be seen as: the fewer, the faster they are compared.
        if self._words is not None and not start % each and not numel % each:
            return torch.equal(words[: numel // each], self._words[start // each : stop // each])
        bits = bits_dtype(kept.itemsize)
        return torch.equal(kept[:numel].view(bits), self._weight[start:stop].view(bits))


class _Room(threading.local):
    """Memory to round into, kept from block to block: allocating it each time costs as much as the rounding."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, like: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for so many elements or more, of the dtype and on the device of others, and the same as words."""
        kind = like.dtype, like.device
        found = self._kept.get(kind)
        if found is None or found[0].numel() < numel:
            kept = torch.empty(-(-numel // 8) * 8, dtype=like.dtype, device=like.device)
            found = self._kept[kind] = kept, kept.view(torch.int64)
        return found
