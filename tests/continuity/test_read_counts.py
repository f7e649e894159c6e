"""Test what is counted as read again or never, by Megatron's own random sampler, in one go and under another layout."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

from mcore_ckpt_ext.continuity.cyclic import ReadingLayout
from mcore_ckpt_ext.continuity.read_counts import ReadCounts, count_reads, has_same_epochs

_BATCH = 24
_LAYOUTS = [(8, 1), (4, 1), (4, 2), (6, 1), (2, 3), (1, 4)]


def _layout(data: int, micro: int, *, sharded: bool) -> ReadingLayout:
    return ReadingLayout(0, 0, data, micro, micro, sharded)


def _read(layout: ReadingLayout, samples: int, consumed: int, last: int) -> list[tuple[int, int]]:
    """All that a job reads from a position to the end of an epoch: the number of the epoch, and the sample.

    Each epoch has samplers of its own: where an epoch is no multiple of what all ranks read at once, Megatron's first
    ranks read one more batch of it without data sharding.
    """
    read: list[tuple[int, int]] = []
    while True:
        ranks = [
            MegatronPretrainingRandomSampler(
                SimpleNamespace(), samples, consumed, layout.micro_batch, rank, layout.data_parallel, layout.is_sharded
            )
            for rank in range(layout.data_parallel)
        ]  # fmt: skip
        steps = [sum(step, []) for step in zip(*ranks, strict=False)]
        if ranks[0].epoch > last:
            return read
        read += [(ranks[0].epoch, sample) for step in steps for sample in step]
        consumed += len(steps) * layout.step


def _epoch(layout: ReadingLayout, samples: int, consumed: int) -> int:
    return consumed // (samples - samples % layout.step)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("samples", [96, 101])
def test_the_counts_are_those_of_the_samplers(samples: int, sharded: bool) -> None:
    counted = []
    for old, new in product(_LAYOUTS, repeat=2):
        before, now = (_layout(*sizes, sharded=sharded) for sizes in (old, new))
        for consumed in range(0, 10 * _BATCH, _BATCH):
            counts = count_reads(samples, consumed, before, now)
            last = max(_epoch(layout, samples, consumed) for layout in (before, now))
            try:
                after = set(_read(now, samples, consumed, last))
            except AssertionError:  # Megatron's, that the position is no multiple of what all ranks read at once
                assert counts is None
                continue
            alone = _read(before, samples, 0, last)
            past = set(alone[:consumed])
            expected = ReadCounts(len(past & after), len({*alone} - past - after))
            assert counts == expected, (old, new, consumed)
            counted.append(expected)
            if has_same_epochs(samples, before, now):
                assert expected == ReadCounts(0, 0)
    is_divided = not sharded and samples == 96  # by every step, so that all layouts have the same epochs
    assert any(counts.again for counts in counted) is not is_divided
    assert any(counts.never for counts in counted) is not is_divided


def test_what_was_measured_in_the_middle_of_an_epoch() -> None:
    before, now = (_layout(size, 1, sharded=True) for size in (8, 4))
    assert count_reads(9600, 4800, before, now) == ReadCounts(2404, 2404)
    unsharded = [_layout(size, 1, sharded=False) for size in (8, 6)]
    assert count_reads(9611, 4800, *unsharded) == ReadCounts(0, 2), "an epoch of DP6 has two samples less"
    assert count_reads(9611, 3 * 9608 + 4800, *unsharded) == ReadCounts(0, 8), "and three have six less"


def test_too_few_samples_for_a_step_are_not_counted() -> None:
    assert count_reads(7, 0, _layout(8, 1, sharded=True), _layout(4, 1, sharded=True)) is None
