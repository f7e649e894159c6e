"""The entries of a checkpoint's index: the location of each chunk of an array and of each object.

The largest indexes have some hundred thousand chunks, of which a rank needs some hundred. So an index stores them as
columns of numbers, which are quickly sent to another rank and checked, and creates the object of a chunk on access.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import prod
from operator import mul
from typing import NamedTuple, overload

from typing_extensions import override

from mcore_ckpt_ext.planning.array_location import ArchivedTensor, PlainExtent
from mcore_ckpt_ext.planning.plan import ITEM_SIZE

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

    def archives(self) -> Iterable[tuple[str, int, int]]:
        """Return the file, and the offset and length in bytes, of the archive of each chunk."""
        if isinstance(self.chunks, TableRows):
            return zip(self.chunks.files, self.chunks.begins, self.chunks.lengths, strict=True)
        return ((extent.file, extent.offset, extent.length) for _, _, extent in self.chunks)

    def bounds_on(self, axis: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the offsets and the sizes of all chunks on one axis."""
        if isinstance(self.chunks, TableRows):
            return self.chunks.bounds_on(axis)
        return [chunk.offsets[axis] for chunk in self.chunks], [chunk.sizes[axis] for chunk in self.chunks]

    def numels(self) -> Iterable[int]:
        """Return the number of elements of each chunk."""
        if isinstance(self.chunks, TableRows):
            return map(prod, self.chunks.sizes)
        return (chunk.extent.numel for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements of all chunks."""
        return sum(self.numels()) * ITEM_SIZE[self.dtype]

    def files_and_bytes(self) -> Iterable[tuple[str, int]]:
        """Return the file and the bytes of the elements of each chunk."""
        nbytes = map(mul, self.numels(), repeat(ITEM_SIZE[self.dtype]))
        return ((file, size) for (file, _, _), size in zip(self.archives(), nbytes, strict=True))


class StoredObject(NamedTuple):
    """A pickled object: an archive of `length` bytes at `offset` of `file`."""

    file: str
    offset: int
    length: int


class ChunkTable:
    """The chunks of all arrays of an index, column by column.

    Each chunk has the number of a file, the offset and the length of its archive in bytes, and as many offsets and
    sizes as its array has axes.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self._number_of_file: dict[str, int] = {}
        self.file_numbers = array("q")
        self.begins = array("q")
        self.lengths = array("q")
        self.offsets = array("q")
        self.sizes = array("q")

    def extend(
        self,
        dtype: str,
        axes: int,
        files: Sequence[str],
        begins: Iterable[int],
        lengths: Iterable[int],
        offsets: Iterable[tuple[int, ...]],
        sizes: Iterable[tuple[int, ...]],
    ) -> TableRows:
        """Add the chunks of an array.

        Args:
            dtype: its dtype, by name.
            axes: the number of its axes.
            files: the file of each chunk.
            begins: the offset of its archive in the file.
            lengths: the length of the archive in bytes.
            offsets: the offsets of the chunk by axis.
            sizes: its sizes by axis.

        Raises:
            TypeError, OverflowError: a value is not an integer, or has more than 63 bits; nothing is added.
        """
        added = [array("q", column) for column in (begins, lengths, *map(chain.from_iterable, (offsets, sizes)))]
        rows = range(len(self.file_numbers), len(self.file_numbers) + len(files))
        chunks = TableRows(self, rows, len(self.offsets), axes, dtype)
        for file in set(files).difference(self._number_of_file):
            self._number_of_file[file] = len(self.files)
            self.files.append(file)
        self.file_numbers.extend(map(self._number_of_file.__getitem__, files))
        for column, values in zip((self.begins, self.lengths, self.offsets, self.sizes), added, strict=True):
            column.extend(values)
        return chunks


class TableRows(Sequence[StoredChunk]):
    """Consecutive rows of a table, which become objects on access."""

    __slots__ = ("_axes", "_bounds", "_dtype", "_rows", "_table")

    def __init__(self, table: ChunkTable, rows: range, bounds: int, axes: int, dtype: str) -> None:
        """Refer to rows of a table.

        Args:
            table: the table.
            rows: their numbers.
            bounds: where the offsets and sizes of the first one begin.
            axes: the number of axes of the array.
            dtype: its dtype, by name.
        """
        self._table = table
        self._rows = rows
        self._bounds = bounds
        self._axes = axes
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def files(self) -> Iterator[str]:
        """The file of each chunk."""
        return map(self._table.files.__getitem__, self._column(self._table.file_numbers))

    @property
    def begins(self) -> array[int]:
        """The offset of the archive of each chunk in its file."""
        return self._column(self._table.begins)

    @property
    def lengths(self) -> array[int]:
        """The length of the archive of each chunk in bytes."""
        return self._column(self._table.lengths)

    @property
    def offsets(self) -> Iterator[tuple[int, ...]]:
        """The offsets of each chunk by axis."""
        return self._tuples(self._table.offsets)

    @property
    def sizes(self) -> Iterator[tuple[int, ...]]:
        """The sizes of each chunk by axis."""
        return self._tuples(self._table.sizes)

    def bounds_on(self, axis: int) -> tuple[array[int], array[int]]:
        """Return the offset and the size of each chunk on one axis."""
        return self._axis_column(self._table.offsets, axis), self._axis_column(self._table.sizes, axis)

    def _column(self, column: array[int]) -> array[int]:
        return column[self._rows.start : self._rows.stop]

    def _axis_column(self, column: array[int], axis: int) -> array[int]:
        return column[self._bounds + axis : self._bounds + len(self) * self._axes : self._axes]

    def _tuples(self, column: array[int]) -> Iterator[tuple[int, ...]]:
        if not self._axes:
            return repeat((), len(self))
        return zip(*(self._axis_column(column, axis) for axis in range(self._axes)), strict=True)

    @overload
    def __getitem__(self, index: int) -> StoredChunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[StoredChunk]: ...

    @override
    def __getitem__(self, index: int | slice) -> StoredChunk | Sequence[StoredChunk]:
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            if step != 1:
                return tuple(self)[index]
            bounds = self._bounds + first * self._axes
            return TableRows(self._table, self._rows[first:stop], bounds, self._axes, self._dtype)
        first = range(len(self))[index]
        return next(iter(self[first : first + 1]))

    @override
    def __iter__(self) -> Iterator[StoredChunk]:
        extents = map(ArchivedTensor, self.files, self.begins, self.lengths, repeat(self._dtype), self.sizes)
        return map(StoredChunk, self.offsets, self.sizes, extents)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (tuple, TableRows)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))
