"""What a conversion writes, as data: files of known size, bytes that are known already, and records to be filled.

Like a plan it can be counted, printed, split between workers and continued after an interruption; making it reads no
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, WantedSlice


@dataclass(frozen=True, slots=True)
class Placed:
    """A wanted slice whose first element is element `start` of its record.

    `turned_rows`: the slice's regions are whole rows of one matrix with that many rows, and the record holds the
    transpose; the slice's `start` and `stop` then count in the transpose. 0 in all other cases.
    """

    start: int
    wanted: WantedSlice
    turned_rows: int = 0

    @property
    def stop(self) -> int:
        """One past its last element in the record."""
        return self.start + self.wanted.slice.numel


@dataclass(frozen=True, slots=True)
class Record:
    """An array of an output file: `numel` elements of `dtype` from byte `offset` on, zero where nothing is placed.

    `checksums`: byte positions in the file that hold the CRC-32 of the array's bytes, little-endian.
    """

    file: str
    offset: int
    dtype: str
    numel: int
    content: tuple[Placed, ...]
    checksums: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * ITEM_SIZE[self.dtype]

    def blocks(self, limit: int) -> Iterator[Block]:
        """The record cut into blocks of at most `limit` bytes, in order."""
        step = max(1, limit // ITEM_SIZE[self.dtype])
        first = 0
        for start in range(0, self.numel, step):
            stop = min(start + step, self.numel)
            while first < len(self.content) and self.content[first].stop <= start:
                first += 1
            yield Block(start, stop, tuple(_parts(self.content, first, start, stop)))


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `[start, stop)` of a record; the content's positions are relative to the block."""

    start: int
    stop: int
    content: tuple[Placed, ...]


def _parts(content: Sequence[Placed], first: int, start: int, stop: int) -> Iterator[Placed]:
    """The parts of `content`, which is sorted, that lie in `[start, stop)`; none before index `first` does."""
    for index in range(first, len(content)):
        placed = content[index]
        if placed.start >= stop:
            return
        low, high = max(start, placed.start), min(stop, placed.stop)
        begin = placed.wanted.slice.start + low - placed.start
        part = Slice(placed.wanted.slice.regions, begin, begin + high - low)
        yield Placed(low - start, replace(placed.wanted, slice=part), placed.turned_rows)


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
