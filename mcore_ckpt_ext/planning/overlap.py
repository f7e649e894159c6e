"""Vectorized interval arithmetic: maps elements of sources to the equal elements of a target.

All positions are in the row-major flattening of one logical tensor. A piece of a region becomes a sorted list of
contiguous *runs* in it. Two lists are intersected, and the result is folded into strided runs, so that a column
shard of a matrix is one entry instead of one entry per row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from mcore_ckpt_ext.lazy_torch import numpy
from mcore_ckpt_ext.model_space.slices import Region

if TYPE_CHECKING:
    from numpy.typing import NDArray

Integers: TypeAlias = "NDArray[numpy.int64]"
Intervals: TypeAlias = "tuple[Integers, Integers, Integers]"
"""The first element of each interval in the flattening, its position in the piece's owner, and its length."""
# An entry of `Runs.rows`: source, target, length, count, source stride, target stride.
Run = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[start, stop)` of a region's row-major flattening, at element `base` of their owner.

    The owner is the stored array that contains the piece, or the destination.
    """

    region: Region
    start: int
    stop: int
    base: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Strided copies, one per entry, in elements: `count` times `length`, `stride` apart on each side."""

    source: Integers
    target: Integers
    length: Integers
    count: Integers
    source_stride: Integers
    target_stride: Integers

    @property
    def numel(self) -> int:
        """Number of elements that all runs copy."""
        return int((self.length * self.count).sum())

    def __len__(self) -> int:
        """Return the number of strided entries."""
        return len(self.source)

    def shift(self, source: int, target: int) -> Runs:
        """Return the same runs with source and target positions increased by these numbers of elements."""
        return replace(self, source=self.source + source, target=self.target + target) if source or target else self

    def within(self, low: int, high: int) -> Runs:
        """Return the part of the runs whose source is in `[low, high)`."""
        row = numpy.arange(int(self.count.sum())) - numpy.repeat(numpy.cumsum(self.count) - self.count, self.count)
        source, target, length, source_stride, target_stride = (
            numpy.repeat(column, self.count)
            for column in (self.source, self.target, self.length, self.source_stride, self.target_stride)
        )
        source = source + row * source_stride
        target = target + row * target_stride
        first = numpy.maximum(source, low)
        last = numpy.minimum(source + length, high)
        kept = first < last
        return fold(first[kept], (target + first - source)[kept], (last - first)[kept])

    def rows(self) -> list[Run]:
        """Return the entries as integers: (source, target, length, count, source stride, target stride)."""
        columns = (self.source, self.target, self.length, self.count, self.source_stride, self.target_stride)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def split_runs(runs: Iterable[Run], limit: int) -> Iterator[Run]:
    """Split runs into runs of at most `limit` elements, keeping the order of elements."""
    for source, target, length, count, source_stride, target_stride in runs:
        at_once = max(1, limit // length)
        for row, column in product(range(0, count, at_once), range(0, length, limit)):
            first = source + row * source_stride + column
            place = target + row * target_stride + column
            rows = min(at_once, count - row)
            width = min(limit, length - column)
            yield first, place, width, rows, source_stride, target_stride


def contiguous_runs(shape: tuple[int, ...], piece: Piece, window: tuple[int, int] | None = None) -> Intervals:
    """Return the maximal contiguous runs of a piece in the flattening of a tensor of `shape`.

    Args:
        shape: global shape of the tensor, which contains the region.
        piece: the piece.
        window: a half-open interval of the flattening; runs outside it may be omitted.

    Returns:
        The runs, ascending by row of the region.
    """
    region = piece.region
    axis = _innermost_cut_axis(shape, region.sizes)
    inner = prod(shape[axis + 1 :])
    length = region.sizes[axis] * inner if shape else 1
    leading = region.sizes[:axis]
    first = piece.start // length
    last = -(-piece.stop // length)
    if window is not None and leading:
        first, last = _rows_in_window(shape, region, axis, window, first, last)
    rows = numpy.arange(first, max(first, last), dtype=numpy.int64)
    origin: Integers = numpy.full_like(rows, region.offsets[axis] * inner if shape else 0)
    remainder: Integers = rows
    for position in reversed(range(axis)):
        remainder, index = numpy.divmod(remainder, leading[position])
        origin += (index + region.offsets[position]) * prod(shape[position + 1 :])
    low: Integers = numpy.maximum(rows * length, piece.start)
    high: Integers = numpy.minimum((rows + 1) * length, piece.stop)
    return origin + (low - rows * length), low - piece.start + piece.base, high - low


def _innermost_cut_axis(shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return the innermost axis that the region does not cover; the axes after it are contiguous."""
    axis = len(shape) - 1
    while axis > 0 and sizes[axis] == shape[axis]:
        axis -= 1
    return max(axis, 0)


def _rows_in_window(
    shape: tuple[int, ...], region: Region, axis: int, window: tuple[int, int], first: int, last: int
) -> tuple[int, int]:
    """Narrow the rows `[first, last)` to those whose outermost index can be in the window."""
    outer_stride = prod(shape[1:])
    rows_per_outer = prod(region.sizes[1:axis])
    low = window[0] // outer_stride - region.offsets[0]
    high = -(-window[1] // outer_stride) - region.offsets[0]
    return max(first, low * rows_per_outer), min(last, high * rows_per_outer)


@dataclass(frozen=True, slots=True)
class Overlap:
    """The runs by source, and the intervals of the target's flattening that no source contains."""

    runs: list[tuple[int, Runs]]
    missing: list[tuple[int, int]]
    missing_at: list[int]


def overlap(shape: tuple[int, ...], target: Piece, sources: Sequence[Piece]) -> Overlap:
    """Intersect one target piece with all sources of the same logical tensor.

    If several sources contain an element, it is copied from the first one in the list.

    Args:
        shape: shape of the tensor in the *target*; sources may be truncated or padded along axis 0 only, which
            preserves the row-major position of every element.
        target: the requested piece.
        sources: the available pieces.

    Returns:
        The index and the runs of each source that is used. `missing` lists the intervals that no source contains as
        `[first, last)` of the flattening, `missing_at` the position of each interval in the target's owner.
    """
    first, last = _span(shape, target)
    touching = []
    for index, source in enumerate(sources):
        low, high = _span(shape, source)
        if low < last and first < high:
            touching.append((index, source, low, high))
    spans = [(target, first, last), *((source, low, high) for _, source, low, high in touching)]
    if all(high - low == piece.stop - piece.start for piece, low, high in spans):
        return _overlap_of_intervals(target, first, last, touching)
    starts, positions, lengths = _sorted_runs(contiguous_runs(shape, target))
    served: list[tuple[int, Runs]] = []
    for index, source, _, _ in touching:
        if not len(starts):
            break
        window = (int(starts[0]), int(starts[-1] + lengths[-1]))
        have = _sorted_runs(contiguous_runs(shape, source, window))
        common = _intersect((starts, positions, lengths), have)
        if len(common[0]):
            served.append((index, fold(*common[1:])))
            starts, positions, lengths = _subtract(starts, positions, lengths, common[0], common[3])
    missing = [(int(a), int(a + n)) for a, n in zip(starts, lengths, strict=True)]
    return Overlap(served, missing, [int(position) for position in positions])


class Overlaps:
    """A cache of overlaps by geometry: equally sharded parameters of one shape differ only in positions.

    This applies to the three kinds of a parameter, and to the layers of a model.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Overlap] = {}

    def of(self, shape: tuple[int, ...], target: Piece, sources: Sequence[Piece]) -> Overlap:
        """Return the same result as `overlap`."""
        key = (shape, _geometry(target), *map(_geometry, sources))
        relative = self._known.get(key)
        if relative is None:
            at_zero = [replace(source, base=0) for source in sources]
            relative = self._known[key] = overlap(shape, replace(target, base=0), at_zero)
        base = target.base
        runs = [(index, runs.shift(sources[index].base, base)) for index, runs in relative.runs]
        return Overlap(runs, relative.missing, [base + position for position in relative.missing_at])


def _geometry(piece: Piece) -> tuple[object, ...]:
    return piece.region.offsets, piece.region.sizes, piece.start, piece.stop


def _span(shape: tuple[int, ...], piece: Piece) -> tuple[int, int]:
    """Return the first element of a piece in the flattening of `shape`, and one past its last."""
    if piece.start >= piece.stop:
        return 0, 0
    return _position(shape, piece.region, piece.start), _position(shape, piece.region, piece.stop - 1) + 1


def _position(shape: tuple[int, ...], region: Region, element: int) -> int:
    """Return the position in the flattening of `shape` of an element of a region's flattening."""
    position = 0
    stride = 1
    for length, size, offset in zip(reversed(shape), reversed(region.sizes), reversed(region.offsets), strict=True):
        element, along = divmod(element, size)
        position += (offset + along) * stride
        stride *= length
    return position


def _overlap_of_intervals(
    target: Piece, first: int, last: int, touching: Sequence[tuple[int, Piece, int, int]]
) -> Overlap:
    """Compute `overlap` for a target and sources that are intervals of the flattening.

    Args:
        target: the requested piece.
        first: its first element.
        last: one past its last element.
        touching: the sources that overlap it: (index, piece, first element, one past its last).
    """
    # The starts and ends of the intervals that are still missing, ascending.
    begins, ends = ([first], [last]) if first < last else ([], [])
    served: list[tuple[int, Runs]] = []
    for index, source, low, high in touching:
        left = bisect_right(ends, low)
        right = bisect_left(begins, high)
        if left >= right:
            continue
        common = [(max(low, begins[at]), min(high, ends[at])) for at in range(left, right)]
        rest = [(begins[left], common[0][0]), (common[-1][1], ends[right - 1])]
        rest = [interval for interval in rest if interval[0] < interval[1]]
        begins[left:right] = [a for a, _ in rest]
        ends[left:right] = [b for _, b in rest]
        starts = numpy.array([a for a, _ in common], dtype=numpy.int64)
        lengths = numpy.array([b - a for a, b in common], dtype=numpy.int64)
        served.append((index, fold(starts - low + source.base, starts - first + target.base, lengths)))
    return Overlap(served, list(zip(begins, ends, strict=True)), [begin - first + target.base for begin in begins])


def _sorted_runs(runs: Intervals) -> Intervals:
    order = numpy.argsort(runs[0], kind="stable")
    return runs[0][order], runs[1][order], runs[2][order]


def _intersect(want: Intervals, have: Intervals) -> tuple[Integers, Integers, Integers, Integers]:
    """Intersect two sorted, disjoint lists: (first, position in have, position in want, length)."""
    want_start, want_at, want_length = want
    have_start, have_at, have_length = have
    low = numpy.searchsorted(have_start + have_length, want_start, side="right")
    high = numpy.searchsorted(have_start, want_start + want_length, side="left")
    hits = numpy.maximum(high - low, 0)
    w = numpy.repeat(numpy.arange(len(want_start)), hits)
    h = numpy.arange(len(w)) - numpy.repeat(numpy.cumsum(hits) - hits, hits) + numpy.repeat(low, hits)
    first = numpy.maximum(want_start[w], have_start[h])
    last = numpy.minimum(want_start[w] + want_length[w], have_start[h] + have_length[h])
    return first, have_at[h] + first - have_start[h], want_at[w] + first - want_start[w], last - first


def _subtract(
    starts: Integers, positions: Integers, lengths: Integers, cut_start: Integers, cut_length: Integers
) -> Intervals:
    """Remove sorted, disjoint intervals, each inside one run, from the runs that are still requested."""
    owner = numpy.searchsorted(starts, cut_start, side="right") - 1
    begins = numpy.concatenate([starts, cut_start + cut_length])
    owners = numpy.concatenate([numpy.arange(len(starts)), owner])
    ends = numpy.concatenate([cut_start, starts + lengths])
    order = numpy.argsort(begins, kind="stable")
    begins = begins[order]
    owners = owners[order]
    ends = numpy.sort(ends, kind="stable")
    keep = ends > begins
    begins = begins[keep]
    owners = owners[keep]
    ends = ends[keep]
    return begins, positions[owners] + begins - starts[owners], ends - begins


def fold(source: Integers, target: Integers, length: Integers) -> Runs:
    """Join adjacent runs, then fold equally spaced runs of one length into strided ones."""
    if len(source) == 1:
        return Runs(source, target, length, *_count_and_strides_of_one())
    if len(source) > 1:
        joins = (source[1:] == source[:-1] + length[:-1]) & (target[1:] == target[:-1] + length[:-1])
        heads = numpy.flatnonzero(numpy.concatenate([[True], ~joins]))
        length = numpy.add.reduceat(length, heads)
        source = source[heads]
        target = target[heads]
    source_gap = numpy.diff(source)
    target_gap = numpy.diff(target)
    begins_new = numpy.ones(len(source), dtype=bool)
    begins_new[1:] = length[1:] != length[:-1]
    begins_new[2:] |= (source_gap[1:] != source_gap[:-1]) | (target_gap[1:] != target_gap[:-1])
    heads = numpy.flatnonzero(begins_new)
    count = numpy.diff(numpy.concatenate([heads, [len(source)]]))
    gaps = numpy.minimum(heads, max(len(source_gap) - 1, 0))
    several = count > 1
    source_stride = numpy.where(several, source_gap[gaps] if len(source_gap) else 0, 0)
    target_stride = numpy.where(several, target_gap[gaps] if len(target_gap) else 0, 0)
    return Runs(source[heads], target[heads], length[heads], count, source_stride, target_stride)


@cache
def _count_and_strides_of_one() -> tuple[Integers, ...]:
    return tuple(numpy.array([number]) for number in (1, 0, 0))
