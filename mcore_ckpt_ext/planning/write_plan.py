"""A conversion's output as data: files of known size, bytes that are known already, and records to be filled.

Like a plan it can be counted, printed, split between workers and continued after an interruption; making it reads no
tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, TargetSlice


@dataclass(frozen=True, slots=True)
class WriteLayout:
    """How a record holds a matrix of `rows` rows otherwise than row by row.

    `transposed`: it holds the transpose. `interleaved`: that many parts of equal height take turns, row by row; of such
    a matrix there is one region. `shift`: what the record's numbers are more, rounded once.
    """

    rows: int
    transposed: bool
    interleaved: int
    shift: float = 0.0

    def reading(self, part: Slice) -> Reading:
        """What has to be read for a part of the record."""
        height, turns = self.rows // self.interleaved, self.interleaved
        if self.transposed:
            left, right = part.start // self.rows, -(-part.stop // self.rows)
            regions = [
                replace(region, offsets=(region.offsets[0], left), sizes=(region.sizes[0], right - left))
                for region in part.regions
            ]
            return Reading(tuple(regions), (turns, height, right - left), (2, 1, 0), part.start - left * self.rows)
        (whole,) = part.regions
        columns = prod(whole.sizes[1:])
        top, bottom = part.start // (turns * columns), -(-part.stop // (turns * columns))
        regions = [
            replace(
                whole,
                offsets=(whole.offsets[0] + turn * height + top, *whole.offsets[1:]),
                sizes=(bottom - top, *whole.sizes[1:]),
            )
            for turn in range(turns)
        ]
        before = part.start - top * turns * columns
        return Reading(tuple(regions), (turns, bottom - top, columns), (1, 0, 2), before)


@dataclass(frozen=True, slots=True)
class Reading:
    """Regions to be read; their elements in `shape`, its axes in this `order`, are those of the record.

    `before`: how many of these come before those that are asked for.
    """

    regions: tuple[Region, ...]
    shape: tuple[int, int, int]
    order: tuple[int, int, int]
    before: int


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A wanted slice whose first element is element `start` of its record.

    `arranged`: the slice's regions are whole rows of one matrix that the record holds otherwise; the slice's `start`
    and `stop` then count in the record's order.
    """

    start: int
    wanted: TargetSlice
    arranged: WriteLayout | None = None

    @property
    def stop(self) -> int:
        """One past its last element in the record."""
        return self.start + self.wanted.slice.numel


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix that a record holds the codes or the scales of: one scale for each block of it.

    Attributes:
        name: for messages.
        content: its numbers, row by row.
        rows: of the matrix.
        columns: of the matrix.
        height: rows of a block; the last ones may have fewer.
        width: columns of a block; likewise.
        scales: the record holds the scales, not the codes.
    """

    name: str
    content: tuple[WriteItem, ...]
    rows: int
    columns: int
    height: int
    width: int
    scales: bool

    @property
    def unit(self) -> int:
        """Elements of the record that are made of one band of the matrix, `height` rows."""
        return -(-self.columns // self.width) if self.scales else self.height * self.columns

    def band(self, number: int) -> Block:
        """The numbers of one band."""
        size = self.height * self.columns
        start, stop = number * size, min((number + 1) * size, self.rows * self.columns)
        return Block(start, stop, tuple(_parts(self.content, 0, start, stop)))


@dataclass(frozen=True, slots=True)
class Record:
    """An array of an output file: `numel` elements of `dtype` from byte `offset` on, zero where nothing is placed.

    `checksums`: byte positions in the file that hold the CRC-32 of the array's bytes, little-endian; `checksum_texts`:
    those that hold it as eight hexadecimal digits. `quantised`: the elements are made of a matrix; then nothing is
    placed.
    """

    file: str
    offset: int
    dtype: str
    numel: int
    content: tuple[WriteItem, ...]
    checksums: tuple[int, ...] = ()
    quantised: Quantised | None = None
    checksum_texts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * ITEM_SIZE[self.dtype]

    def step(self, limit: int) -> int:
        """Elements of a block of at most `limit` bytes; the last one may have fewer."""
        unit = self.quantised.unit if self.quantised else 1
        return max(1, limit // ITEM_SIZE[self.dtype] // unit) * unit

    def blocks(self, limit: int, begin: int = 0, end: int | None = None) -> Iterator[Block]:
        """The record, or what lies between the beginnings of two blocks, cut into blocks of at most `limit` bytes."""
        step, end = self.step(limit), self.numel if end is None else end
        for start in range(begin, end, step):
            stop = min(start + step, end)
            first = bisect_right(self.content, start, key=lambda placed: placed.stop)
            yield Block(start, stop, tuple(_parts(self.content, first, start, stop)))


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `[start, stop)` of a record; the content's positions are relative to the block."""

    start: int
    stop: int
    content: tuple[WriteItem, ...]


def _parts(content: Sequence[WriteItem], first: int, start: int, stop: int) -> Iterator[WriteItem]:
    """The parts of `content`, which is sorted, that lie in `[start, stop)`; none before index `first` does."""
    for index in range(first, len(content)):
        placed = content[index]
        if placed.start >= stop:
            return
        low, high = max(start, placed.start), min(stop, placed.stop)
        begin = placed.wanted.slice.start + low - placed.start
        part = Slice(placed.wanted.slice.regions, begin, begin + high - low)
        yield WriteItem(low - start, replace(placed.wanted, slice=part), placed.arranged)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file: its size in bytes, and the parts of it that are already known, as (byte offset, bytes).

    `last`: it tells readers that everything is there, so it is written once everything is.
    """

    name: str
    length: int
    literals: tuple[tuple[int, bytes], ...]
    last: bool = False


@dataclass(frozen=True)
class Output:
    """All files below the destination's folder, the records in them, and what their reader should know."""

    files: Sequence[OutputFile]
    records: Sequence[Record]
    notes: Sequence[str] = ()

    @property
    def bytes_written(self) -> int:
        """Size of all files in bytes."""
        return sum(file.length for file in self.files)
