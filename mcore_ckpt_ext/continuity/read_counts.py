"""Counts what a random sampler reads again or never under another layout.

It derives the order of an epoch from the layout, in stock Megatron and in Megatron-Bridge; with this package,
Megatron's reads on in the old order (see `continuity.cyclic`). No checkpoint has the number of samples of the data set.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_ckpt_ext.continuity.cyclic import EpochInProgress, ReadingLayout, epoch_at
from mcore_ckpt_ext.lazy_torch import torch

MOST_SAMPLES = 10_000_000
"""Data sets with more samples are not counted: it takes about a second for each million."""


@dataclass(frozen=True)
class ReadCounts:
    """How many samples a job reads again or never, in the epochs that it does not read in one order.

    Attributes:
        again: samples that were read before, and will be read again in the same epoch.
        never: samples that the job would have read in these epochs under its old layout, and will not read in them.
    """

    again: int
    never: int

    def __str__(self) -> str:
        return f"read {self.again:,} of the samples again and {self.never:,} never"


def drawn_permutation(numbers: int, seed: int) -> Sequence[int]:
    """Return the permutation that Megatron draws for an epoch.

    Source: `MegatronPretrainingRandomSampler.__iter__`, as in `continuity.cyclic`.
    """
    generator = torch.Generator()
    generator.manual_seed(seed)
    drawn: list[int] = torch.randperm(numbers, generator=generator).tolist()
    return drawn


def has_same_epochs(samples: int, before: ReadingLayout, now: ReadingLayout) -> bool:
    """Return whether a random sampler has the same epochs, in the same order, under two layouts.

    Args:
        samples: the samples of the data set.
        before: one layout.
        now: the other.
    """
    if before.is_sharded and now.is_sharded and before.data_parallel != now.data_parallel:
        return False
    drawn = {samples // layout.micro_batch * layout.micro_batch for layout in (before, now)}
    epochs = {samples // layout.step * layout.step for layout in (before, now)}
    is_sharded = {before.is_sharded, now.is_sharded}
    return len(is_sharded) == len(epochs) == 1 and (before.is_sharded or len(drawn) == 1)


@functools.cache
def count_reads(samples: int, consumed: int, before: ReadingLayout, now: ReadingLayout) -> ReadCounts | None:
    """Return what a random sampler reads again or never after a change of layout.

    Args:
        samples: the samples of the data set.
        consumed: the samples that were consumed before the change.
        before: the layout until then, as `ReadingLayout.of` returns it.
        now: the layout from then on.

    Returns:
        The counts; None if the sampler stops at its first batch, because the position is no multiple of what all ranks
        read at once, or because the data set has too few samples for that.
    """
    if samples < max(before.step, now.step):
        return None
    old, new = (epoch_at((layout,), samples, consumed) for layout in (before, now))
    if (consumed - new.start) % now.step:
        return None
    again = 0
    never = 0
    for number in range(min(old.epoch, new.epoch), max(old.epoch, new.epoch) + 1):
        old_order = _samples_in_order(old, number)
        was_read = bytearray(samples)
        for sample in old_order[: _count_consumed(old, number, consumed)]:
            was_read[sample] = 1
        for sample in _samples_in_order(new, number)[_count_consumed(new, number, consumed) :]:
            again += was_read[sample]
            was_read[sample] = 1
        never += sum(not was_read[sample] for sample in old_order)
    return ReadCounts(again, never)


def _samples_in_order(present: EpochInProgress, number: int) -> list[int]:
    """Return the samples of the epoch with a number, in the order of the layout of the one in progress.

    Those that fill no step are left out.
    """
    sample_at = replace(present, epoch=number).sample_at(drawn_permutation)
    return [sample_at(position) for position in range(present.end - present.start)]


def _count_consumed(present: EpochInProgress, number: int, consumed: int) -> int:
    """Return how many samples of the epoch with a number were consumed, all by one layout."""
    if number == present.epoch:
        return consumed - present.start
    return present.end - present.start if number < present.epoch else 0
