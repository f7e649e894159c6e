"""The ways in which an array can lie in a file.

Each of them gives the `file`, the byte `offset` and `length` of what holds the array, its `dtype` by name, and its
number of elements `numel`. An archive's payload is looked up when it is read, not when the plan is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple


class ArchivedTensor(NamedTuple):
    """The one tensor, of that shape, of the torch archive of `length` bytes at `offset` of `file`."""

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
    """A storage of the torch archive of `length` bytes at `offset` of `file`: the archive's record of that name."""

    file: str
    offset: int
    length: int
    dtype: str
    numel: int
    record: str


class RawArray(NamedTuple):
    """Nothing but the elements, from byte `offset` on; `crc`: the CRC-32 of the bytes, where it is known."""

    file: str
    offset: int
    length: int
    dtype: str
    numel: int
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class ScaleCodec:
    """A quantised matrix, whose elements are counted as those of the numbers that its codes stand for.

    Attributes:
        codes: one for each element, or, where `packed`, a byte for two of them, the lower half first.
        scales: one for each block of the matrix, row by row, in float; or, where `packed`, exponents of two plus 127.
        rows: of the matrix.
        columns: of the matrix.
        block: rows and columns of a block; those at the edges may be smaller.
        dtype: of the numbers, by name.
        packed: the codes are 4-bit floats (E2M1, as in OCP's MX formats).
    """

    codes: ArchivedTensor | ArchivedRecord | RawArray
    scales: ArchivedTensor | ArchivedRecord | RawArray
    rows: int
    columns: int
    block: tuple[int, int]
    dtype: str
    packed: bool = False

    @property
    def file(self) -> str:
        """As the codes have it."""
        return self.codes.file

    @property
    def offset(self) -> int:
        """As the codes have it."""
        return self.codes.offset

    @property
    def length(self) -> int:
        """As the codes have it."""
        return self.codes.length

    @property
    def numel(self) -> int:
        """The number of elements, not of codes."""
        return self.rows * self.columns


PlainExtent = ArchivedTensor | ArchivedRecord | RawArray


@dataclass(frozen=True, slots=True)
class TransposeCodec:
    """A matrix that lies in an array otherwise than its elements are counted, which is row by row.

    Attributes:
        array: what holds the matrix.
        first: the element of the array that the matrix begins with.
        rows: of the matrix, as its elements are counted.
        columns: of the matrix.
        transposed: the array holds the transpose.
        interleaved: in the array that many parts of the matrix, of equal height, take turns row by row; 1: none do.
        shift: what the numbers of the matrix are more than those of the array; rounded once.
    """

    array: PlainExtent | ScaleCodec
    first: int
    rows: int
    columns: int
    transposed: bool = False
    interleaved: int = 1
    shift: float = 0.0

    @property
    def file(self) -> str:
        """As the array has it."""
        return self.array.file

    @property
    def offset(self) -> int:
        """As the array has it."""
        return self.array.offset

    @property
    def length(self) -> int:
        """As the array has it."""
        return self.array.length

    @property
    def dtype(self) -> str:
        """As the array has it."""
        return self.array.dtype

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.columns


Extent = PlainExtent | ScaleCodec | TransposeCodec
