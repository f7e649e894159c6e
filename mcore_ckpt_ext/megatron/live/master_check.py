"""Verifies in a live job that each master rounds to its weight, bit for bit (`layout.master_check`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mcore_ckpt_ext.errors import CheckpointError, ProofError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING, MasterCheck, Mismatch, bits_dtype, weaker_of
from mcore_ckpt_ext.megatron.live.model import Chunks, live_parameters, parameters_as_named, quantization_check
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard, Shard
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import optimizer_adapters_of
from mcore_ckpt_ext.optimizers.stored_scales import check_at_stored_scales

_BLOCK = 1 << 24
_SAMPLE = 1024
STRETCH = 1 << 17
"""Number of elements that fit into the processor's cache, so that rounding and comparing is one pass over memory."""


class Prover:
    """Verifies masters against the live weights, during the read and afterwards; thread-safe.

    Args:
        masters: the masters of each shard, 1-D.
        checkpoint: the checkpoint from which they are read.
    """

    def __init__(self, masters: Mapping[LiveShard, torch.Tensor], checkpoint: CheckpointView) -> None:
        self._masters = masters
        self._checkpoint = checkpoint
        plain = {shard: shard.weight for shard in masters if quantization_check(shard.live.parameter) is None}
        near = {shard: weight for shard, weight in plain.items() if weight.device == masters[shard].device}
        self._pairs = {shard: _Pair(masters[shard], weight) for shard, weight in near.items()}
        self._room = _Room()
        self._equal: list[tuple[LiveShard, int]] = []

    def on_read(self, shard: LiveShard, start: int, stop: int) -> None:
        """Count masters that have just been read if they round to their weights exactly.

        All other masters are left to `finish`, which applies the checkpoint's own comparison and reports mismatches.
        """
        pair = self._pairs.get(shard)
        if pair is not None and pair.rounds(start, stop, self._room):
            self._equal.append((shard, stop - start))

    def finish(self) -> None:
        """Verify the shards of which `on_read` has not counted every master.

        Raises:
            ProofError: a master does not round to its weight.
        """
        left = {shard: master.numel() for shard, master in self._masters.items()}
        for shard, count in self._equal:
            left[shard] -= count
        for shard, count in left.items():
            if count and not self._checkpoint.optimizer.masters_are_derived(shard.name):
                try:
                    prove(shard, self._masters[shard], self._checkpoint)
                except ProofError as error:
                    if self._none_matches():
                        raise self._not_loaded(error) from error
                    raise

    def _none_matches(self) -> bool:
        """Return True if no parameter of this rank, except constant ones, matches its masters."""
        matches = [sample_matches(shard, master) for shard, master in self._masters.items()]
        return False in matches and True not in matches

    def _not_loaded(self, error: ProofError) -> ProofError:
        return ProofError(
            "the live weights are not those of the checkpoint: none equals its rounded master",
            found=error.found,
            expected="weights that are loaded before the optimizer",
            where=str(self._checkpoint.files.folder),
            hint="load the weights of the same checkpoint first",
        )


def prove(shard: Shard, master: torch.Tensor, checkpoint: CheckpointView) -> None:
    """Verify a shard's masters against the live weights, within the rounding of fp8 or fp4 weights.

    Raises:
        ProofError: a master does not round to its weight.
    """
    stored = check_at_stored_scales(
        checkpoint, shard.live.tensors, checkpoint.job.master_check, checkpoint.files.transfer
    )
    master_check = weaker_of(stored, quantization_check(shard.live.parameter))
    weight = shard.weight
    for begin in range(0, master.numel(), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        first = shard.slice.start + begin

        def where(position: int, first: int = first) -> str:
            return f"{shard.name}, element {first + position} of this rank's part, {checkpoint.files.folder}"

        more_hint = ": resume from another iteration, or with --no-load-optim and a fresh optimizer"
        weight_part = weight[part] if weight.device == master.device else weight[part].to(master.device)
        master_check.verify(master[part], weight_part, where, more_hint)


def sample_matches(shard: LiveShard, master: torch.Tensor, master_check: MasterCheck = BY_ROUNDING) -> bool | None:
    """Return True if the first elements of a shard's masters match its weights.

    Returns:
        True or False; None if they show nothing: the weight is constant there, as biases and norms initially are, or
        only a minority differs, as in a weight that has hardly been trained.
    """
    weight = shard.weight[:_SAMPLE]
    master = master[:_SAMPLE]
    if not weight.numel() or bool((weight == weight[0]).all()):
        return None
    if master.device != weight.device:
        weight = weight.to(master.device)
    with torch.no_grad():
        mismatch = weaker_of(master_check, quantization_check(shard.live.parameter)).first_mismatch(master, weight)
    if mismatch is None:
        return True
    return False if 2 * mismatch.count > master.numel() else None


@dataclass(frozen=True)
class LiveMismatch:
    """The first mismatch of a live parameter on one rank; its position counts in the whole parameter."""

    name: str
    first: Mismatch

    def __str__(self) -> str:
        first = self.first
        return f"{self.name}, element {first.position}: master {first.master!r}, weight {first.weight!r}"


def live_mismatches(
    chunks: Chunks, optimizer: Any, permitted: MasterCheck | None = None, every: int = 1
) -> list[LiveMismatch]:
    """Return parameters of the live optimizer whose masters do not round to the live weights.

    It reads no checkpoint, so that it verifies any load, the framework's included. It costs one pass over masters and
    weights: the optimizer itself pairs them, and the model's sharded state dict is needed only to name a mismatch.

    Args:
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer.
        permitted: the comparison that the loaded checkpoint permits, if rounding is too strict for it.
        every: compare one of this many stretches of `STRETCH` elements of this rank's part of a parameter, and the
            last one. A misplaced or unset parameter is found in any case, damage within a single stretch may not be.

    Raises:
        UnsupportedCheckpointError: this package does not support the kind of optimizer.
        CheckpointError: a parameter cannot be compared, and no earlier one has a mismatch.
    """
    adapters = optimizer_adapters_of(optimizer)
    live = parameters_as_named(chunks)
    room = _Room()
    mismatches: dict[int, LiveMismatch] = {}
    try:
        for shard in (shard for adapter in adapters for shard in adapter.shards(live)):
            number = id(shard.live.parameter)
            if number not in mismatches and (mismatch := _first_mismatch(shard, permitted, room, every)) is not None:
                mismatches[number] = mismatch
    except CheckpointError:
        if not mismatches:
            raise
    return _name_mismatches(mismatches, chunks) if mismatches else []


def _name_mismatches(mismatches: Mapping[int, LiveMismatch], chunks: Chunks) -> list[LiveMismatch]:
    """Return the mismatches under the names in checkpoints; parameters that are never stored keep theirs."""
    live = live_parameters(chunks)
    return [
        replace(mismatch, name=live[number].regions[0].name) if number in live else mismatch
        for number, mismatch in mismatches.items()
    ]


def _first_mismatch(shard: LiveShard, permitted: MasterCheck | None, room: _Room, every: int) -> LiveMismatch | None:
    master_check = shard.adapter.master_check(shard)
    if master_check is None:
        return None
    # Quantized live weights may have been quantized again, whatever loaded them.
    master_check = weaker_of(master_check, permitted or quantization_check(shard.live.parameter))
    weight = shard.weight
    master = shard.adapter.master(shard)
    if master.data_ptr() == weight.data_ptr():
        return None  # fp32 training: masters and weights are the same memory
    # Each block on a GPU costs a synchronization, so its blocks are large; a CPU block fits into the cache.
    is_near = master.device.type == weight.device.type == "cpu"
    size = STRETCH if is_near else _BLOCK
    numel = master.numel()
    pair = _Pair(master, weight) if master.device == weight.device else None
    for begin in range(0, numel, size):
        number = begin // size
        part = slice(begin, min(begin + size, numel))
        if is_near and number % every and part.stop < numel:
            continue
        if pair is not None and pair.rounds(begin, part.stop, room):
            continue
        weight_part = weight[part] if is_near else weight[part].to(master.device)
        mismatch = master_check.first_mismatch(master[part], weight_part)
        if mismatch is not None:
            position = shard.slice.start + begin + mismatch.position
            return LiveMismatch(shard.name, replace(mismatch, position=position))
    return None


class _Pair:
    """Masters and their weights, 1-D on one device, viewed so that comparing a stretch takes few calls."""

    def __init__(self, master: torch.Tensor, weight: torch.Tensor) -> None:
        self._master = master
        self._weight = weight
        self._each = each = 8 // weight.dtype.itemsize
        in_words = weight.stride() == (1,) and not weight.storage_offset() % each
        self._words = weight[: weight.numel() // each * each].view(torch.int64) if in_words else None

    def rounds(self, start: int, stop: int, room: _Room) -> bool:
        """Return True if the masters in a range round to their weights, bit for bit."""
        numel = stop - start
        each = self._each
        kept, words = room.of(self._weight, numel)
        kept[:numel].copy_(self._master[start:stop])
        # Compare as the widest integers possible: the fewer elements, the faster.
        if self._words is not None and not start % each and not numel % each:
            return torch.equal(words[: numel // each], self._words[start // each : stop // each])
        bits = bits_dtype(kept.itemsize)
        return torch.equal(kept[:numel].view(bits), self._weight[start:stop].view(bits))


class _Room(threading.local):
    """Memory to round into, reused for all blocks: allocating it each time costs as much as rounding."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, like: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for at least `numel` elements like a tensor's, and a view of it as int64."""
        kind = like.dtype, like.device
        memory = self._kept.get(kind)
        if memory is None or memory[0].numel() < numel:
            kept = torch.empty(-(-numel // 8) * 8, dtype=like.dtype, device=like.device)
            memory = self._kept[kind] = kept, kept.view(torch.int64)
        return memory
