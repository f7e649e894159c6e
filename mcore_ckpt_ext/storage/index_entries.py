"""The entries of a checkpoint's index: the location of each chunk of an array and of each object.

The largest indexes have some hundred thousand chunks, of which a rank needs some hundred. So an index stores them as a
table of numbers, which is quickly sent to another rank, and creates the object of a chunk on access.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod
from typing import NamedTuple, overload

from typing_extensions import override

from mcore_ckpt_ext.planning.array_location import ArchivedTensor, PlainExtent

METADATA_FILE = ".metadata"
"""The index of torch's distributed checkpoints (torch/distributed/checkpoint/filesystem.py)."""


class StoredChunk(NamedTuple):
    """A hyper-rectangle of a stored array, and the archive that contains it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: PlainExtent


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of the checkpoint under Megatron's sharded key; shape in elements, dtype by name."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: Sequence[StoredChunk]

    def places(self) -> Iterator[tuple[str, int]]:
        """Return the file and the number of elements of each chunk."""
        if isinstance(self.chunks, _TableRows):
            return self.chunks.places()
        return ((chunk.extent.file, chunk.extent.numel) for chunk in self.chunks)


class StoredObject(NamedTuple):
    """A pickled object: an archive of `length` bytes at `offset` of `file`."""

    file: str
    offset: int
    length: int


class ChunkTable:
    """The chunks of all arrays of an index, row by row.

    A row has the number of the file, the offset and the length of the archive in bytes, then the offsets and the sizes
    of the chunk for each axis. So rows of arrays with more axes are longer.
    """

    def __init__(self) -> None:
        self._files: list[str] = []
        self._numbers: dict[str, int] = {}
        self._rows = array("q")

    def append(self, file: str, offset: int, length: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Add a chunk, and the archive of `length` bytes at `offset` of `file` that contains it.

        Raises:
            TypeError, OverflowError: a value is not an integer, or has more than 63 bits; nothing is added.
        """
        number = self._numbers.get(file)
        if number is None:
            number = self._numbers[file] = len(self._files)
            self._files.append(file)
        self._rows.extend(array("q", (number, offset, length, *offsets, *sizes)))

    @property
    def end(self) -> int:
        """Position of the next row."""
        return len(self._rows)

    def chunks(self, begin: int, axes: int, dtype: str) -> Sequence[StoredChunk]:
        """Return the rows from `begin` to the end as chunks of an array with `axes` axes."""
        return _TableRows(self, range(begin, self.end, 3 + 2 * axes), axes, dtype)

    def places(self, rows: range, axes: int) -> Iterator[tuple[str, int]]:
        """Return the file and the number of elements for each row."""
        columns = self._columns(rows)
        numels = columns[-1] if axes == 1 else map(prod, self._by_row(columns[3 + axes :], rows))
        return zip(map(self._files.__getitem__, columns[0]), numels, strict=True)

    def _columns(self, rows: range) -> list[array[int]]:
        return [self._rows[rows.start + column : rows.stop : rows.step] for column in range(rows.step)]

    @staticmethod
    def _by_row(columns: list[array[int]], rows: range) -> list[tuple[int, ...]]:
        return list(zip(*columns, strict=True)) if columns else [()] * len(rows)

    def made_of(self, rows: range, axes: int, dtype: str) -> Iterator[StoredChunk]:
        """Return the chunk for each row; `rows` are their positions."""
        columns = self._columns(rows)
        numbers, begins, lengths = columns[:3]
        offsets = self._by_row(columns[3 : 3 + axes], rows)
        sizes = self._by_row(columns[3 + axes :], rows)
        files = map(self._files.__getitem__, numbers)
        extents = map(ArchivedTensor, files, begins, lengths, repeat(dtype), sizes)
        return map(StoredChunk, offsets, sizes, extents)


class _TableRows(Sequence[StoredChunk]):
    """Rows of a table, which become objects on access."""

    __slots__ = ("_axes", "_dtype", "_rows", "_table")

    def __init__(self, table: ChunkTable, rows: range, axes: int, dtype: str) -> None:
        self._table = table
        self._rows = rows
        self._axes = axes
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._rows)

    def places(self) -> Iterator[tuple[str, int]]:
        """Return the file and the number of elements of each chunk."""
        return self._table.places(self._rows, self._axes)

    @overload
    def __getitem__(self, index: int) -> StoredChunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[StoredChunk]: ...

    @override
    def __getitem__(self, index: int | slice) -> StoredChunk | Sequence[StoredChunk]:
        if isinstance(index, slice):
            return tuple(self)[index]
        begin = self._rows[index]
        return next(
            self._table.made_of(range(begin, begin + self._rows.step, self._rows.step), self._axes, self._dtype)
        )

    @override
    def __iter__(self) -> Iterator[StoredChunk]:
        return self._table.made_of(self._rows, self._axes, self._dtype)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (tuple, _TableRows)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))
