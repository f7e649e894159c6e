"""The location of an array in a file, in one class for each kind of storage.

Each class has the `file`, the byte `offset` and `length` of the storage that contains the array, the array's `dtype` by
name, and its number of elements `numel`. The payload within an archive is located on reading, not on planning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from typing_extensions import override


class ArchivedTensor(NamedTuple):
    """The only tensor, of this shape, in the torch archive of `length` bytes at `offset` of `file`."""

    file: str
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class ArchivedRecord(NamedTuple):
    """The storage named `record` in the torch archive of `length` bytes at `offset` of `file`."""

    file: str
    offset: int
    length: int
    dtype: str
    numel: int
    record: str


class RawArray(NamedTuple):
    """An array stored as its elements alone, from byte `offset` on.

    `crc`: the CRC-32 of the bytes, if known.
    """

    file: str
    offset: int
    length: int
    dtype: str
    numel: int
    crc: int | None = None


PlainExtent = ArchivedTensor | ArchivedRecord | RawArray


class _Matrix(ABC):
    """A matrix that is computed from the array with its numbers, and lies where that array lies."""

    __slots__ = ()
    rows: int
    columns: int

    @property
    @abstractmethod
    def stored(self) -> PlainExtent | QuantizedMatrix:
        """The array with its numbers."""

    @property
    def file(self) -> str:
        """The file of the array."""
        return self.stored.file

    @property
    def offset(self) -> int:
        """The offset of the array."""
        return self.stored.offset

    @property
    def length(self) -> int:
        """The length of the array."""
        return self.stored.length

    @property
    def numel(self) -> int:
        """Number of elements of the matrix."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class QuantizedMatrix(_Matrix):
    """A quantized matrix; its elements are the numbers that the codes represent.

    Attributes:
        codes: one for each element; if `packed`, one byte for two elements, the lower half first.
        scales: one for each block of the matrix, row by row, as floats, or in MX formats as exponents of two plus 127
            (bytes).
        rows: rows of the matrix.
        columns: columns of the matrix.
        block: rows and columns of a block; blocks at the edges may be smaller.
        dtype: the dtype of the numbers, by name.
        packed: whether the codes are 4-bit floats (E2M1, as in OCP's MX formats and in NVFP4).
        common_scale: a further scale of the whole matrix, which NVFP4 has.
    """

    codes: PlainExtent
    scales: PlainExtent
    rows: int
    columns: int
    block: tuple[int, int]
    dtype: str
    packed: bool = False
    common_scale: PlainExtent | None = None

    @property
    @override
    def stored(self) -> PlainExtent:
        return self.codes


@dataclass(frozen=True, slots=True)
class ReorderedMatrix(_Matrix):
    """A matrix whose elements, counted row by row, have another order in the array that stores it.

    Attributes:
        array: the array that contains the matrix.
        first: the first element of the matrix in the array.
        rows: rows of the matrix.
        columns: columns of the matrix.
        transposed: whether the array contains the transpose.
        interleaved: the number of equally high parts of the matrix whose rows are interleaved in the array; 1: none.
        shift: the difference of the matrix's values from those of the array; the sum is rounded once.
    """

    array: PlainExtent | QuantizedMatrix
    first: int
    rows: int
    columns: int
    transposed: bool = False
    interleaved: int = 1
    shift: float = 0.0

    @property
    @override
    def stored(self) -> PlainExtent | QuantizedMatrix:
        return self.array

    @property
    def dtype(self) -> str:
        """The dtype of the array."""
        return self.array.dtype


Extent = PlainExtent | QuantizedMatrix | ReorderedMatrix
