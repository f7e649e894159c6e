"""The output of a conversion as data: files of known size, bytes known already, records to fill.

Like a plan for reading, it can be counted, printed, split between workers and continued after an interruption. Making
it reads no tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, TargetSlice


@dataclass(frozen=True, slots=True)
class MatrixOrder:
    """The order of a matrix of `rows` rows in a record, if it is not row by row.

    Attributes:
        rows: rows of the matrix.
        transposed: whether the record contains the transpose.
        interleaved: the number of equally high parts whose rows are interleaved; such a matrix has one region.
        shift: the difference of the record's values from the matrix's; the sum is rounded once.
    """

    rows: int
    transposed: bool
    interleaved: int
    shift: float = 0.0

    def regions_to_read(self, part: Slice) -> ReorderedRead:
        """Return the regions to read for a part of the record."""
        height = self.rows // self.interleaved
        turns = self.interleaved
        if self.transposed:
            left = part.start // self.rows
            right = -(-part.stop // self.rows)
            regions = [
                replace(region, offsets=(region.offsets[0], left), sizes=(region.sizes[0], right - left))
                for region in part.regions
            ]
            return ReorderedRead(
                tuple(regions), (turns, height, right - left), (2, 1, 0), part.start - left * self.rows
            )
        (whole,) = part.regions
        columns = prod(whole.sizes[1:])
        top = part.start // (turns * columns)
        bottom = -(-part.stop // (turns * columns))
        regions = [
            replace(
                whole,
                offsets=(whole.offsets[0] + turn * height + top, *whole.offsets[1:]),
                sizes=(bottom - top, *whole.sizes[1:]),
            )
            for turn in range(turns)
        ]
        before = part.start - top * turns * columns
        return ReorderedRead(tuple(regions), (turns, bottom - top, columns), (1, 0, 2), before)


@dataclass(frozen=True, slots=True)
class ReorderedRead:
    """Regions to read, and how to reorder them: their elements in `shape`, permuted to `axes`.

    `before`: the number of elements that precede the requested ones after reordering.
    """

    regions: tuple[Region, ...]
    shape: tuple[int, int, int]
    axes: tuple[int, int, int]
    before: int


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A requested slice whose first element is element `start` of its record.

    `order`: if it is set, the slice's regions are whole rows of one matrix in another order, and the slice's
    `start` and `stop` count in the record's order.
    """

    start: int
    wanted: TargetSlice
    order: MatrixOrder | None = None

    @property
    def stop(self) -> int:
        """One past its last element in the record."""
        return self.start + self.wanted.slice.numel


@dataclass(frozen=True, slots=True)
class QuantizedOutput:
    """A matrix whose codes, or whose scales, a record contains; each block of the matrix has one scale.

    Attributes:
        name: its name in messages.
        content: its numbers, row by row.
        rows: rows of the matrix.
        columns: columns of the matrix.
        height: rows of a block; the last blocks may have fewer.
        width: columns of a block; the last blocks may have fewer.
        scales: whether the record contains the scales, not the codes.
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
        """Number of elements of the record for one band of `height` rows of the matrix."""
        return -(-self.columns // self.width) if self.scales else self.height * self.columns

    def band(self, number: int) -> Block:
        """Return the numbers of one band."""
        size = self.height * self.columns
        start = number * size
        stop = min((number + 1) * size, self.rows * self.columns)
        return Block(start, stop, tuple(_parts(self.content, 0, start, stop)))


@dataclass(frozen=True, slots=True)
class Record:
    """An array of an output file: `numel` elements of `dtype` from byte `offset` on.

    Elements without content are zero.

    Attributes:
        file: the name of the file.
        offset: the first byte of the array.
        dtype: its dtype by name.
        numel: its number of elements.
        content: the requested slices, sorted by their position in the record.
        checksums: byte positions in the file that contain the CRC-32 of the array's bytes, little-endian.
        quantized: the matrix that the elements are computed from; then `content` is empty.
        checksum_texts: byte positions that contain the CRC-32 as eight hexadecimal digits.
    """

    file: str
    offset: int
    dtype: str
    numel: int
    content: tuple[WriteItem, ...]
    checksums: tuple[int, ...] = ()
    quantized: QuantizedOutput | None = None
    checksum_texts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * ITEM_SIZE[self.dtype]

    def step(self, limit: int) -> int:
        """Return the number of elements in a block of at most `limit` bytes; the last block may have fewer."""
        unit = self.quantized.unit if self.quantized else 1
        return max(1, limit // ITEM_SIZE[self.dtype] // unit) * unit

    def blocks(self, limit: int, begin: int = 0, end: int | None = None) -> Iterator[Block]:
        """Split the record, or the part between two block boundaries, into blocks of at most `limit` bytes."""
        step = self.step(limit)
        end = self.numel if end is None else end
        for start in range(begin, end, step):
            stop = min(start + step, end)
            first = bisect_right(self.content, start, key=lambda placed: placed.stop)
            yield Block(start, stop, tuple(_parts(self.content, first, start, stop)))


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `[start, stop)` of a record; positions in its content are relative to the block."""

    start: int
    stop: int
    content: tuple[WriteItem, ...]


def _parts(content: Sequence[WriteItem], first: int, start: int, stop: int) -> Iterator[WriteItem]:
    """Yield the parts of sorted `content` in `[start, stop)`; those before index `first` end before it."""
    for index in range(first, len(content)):
        placed = content[index]
        if placed.start >= stop:
            return
        low = max(start, placed.start)
        high = min(stop, placed.stop)
        begin = placed.wanted.slice.start + low - placed.start
        part = Slice(placed.wanted.slice.regions, begin, begin + high - low)
        yield WriteItem(low - start, replace(placed.wanted, slice=part), placed.order)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file: its size in bytes, and its known parts as (byte offset, bytes).

    `last`: whether it marks the result as complete, so that it is written after all others.
    """

    name: str
    length: int
    literals: tuple[tuple[int, bytes], ...]
    last: bool = False


@dataclass(frozen=True)
class Output:
    """All files relative to the destination's folder, the records in them, and notes for the user."""

    files: Sequence[OutputFile]
    records: Sequence[Record]
    notes: Sequence[str] = ()

    @property
    def bytes_written(self) -> int:
        """Size of all files in bytes."""
        return sum(file.length for file in self.files)
