"""The differences of two tensors: how many elements, how large, and a coarse picture of where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.optimizers.tied_copies import bits_of

MOST_ROWS = 16
MOST_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class DifferenceMap:
    """The differences of two tensors, counted in the cells of a grid; cells without any are absent.

    The grid's rows divide the tensor's first axis, its columns all other axes.

    Attributes:
        rows: the number of rows of cells.
        columns: the number of columns of cells.
        cells: (number of the cell, row by row; number of elements that differ; the largest absolute difference of two
            finite numbers).
    """

    rows: int
    columns: int
    cells: tuple[tuple[int, int, float], ...]


class MapBuilder:
    """Adds up the differences of a tensor's blocks.

    Args:
        shape: the shape of the tensor; the elements that are compared come first.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._height = shape[0] if len(shape) > 1 else 1
        self._width = max(1, prod(shape[1:]) if len(shape) > 1 else prod(shape))
        self.rows = max(1, min(self._height, MOST_ROWS))
        self.columns = min(self._width, MOST_COLUMNS)
        self._different = torch.zeros(self.rows * self.columns, dtype=torch.int64)
        self._largest = torch.zeros(self.rows * self.columns, dtype=torch.float64)

    def add(self, positions: torch.Tensor, distances: torch.Tensor) -> None:
        """Record elements that differ.

        Args:
            positions: int64, the positions of the elements in the tensor, row-major.
            distances: float64, one for each position; not finite if one of the two numbers is not.
        """
        row = (positions // self._width).clamp(max=max(0, self._height - 1)) * self.rows // max(1, self._height)
        cell = row * self.columns + positions % self._width * self.columns // self._width
        self._different += torch.bincount(cell, minlength=len(self._different))
        finite = torch.where(torch.isfinite(distances), distances, 0.0)
        self._largest.scatter_reduce_(0, cell, finite, "amax")

    def finish(self) -> DifferenceMap:
        """Return the picture of everything that was added."""
        (cells,) = self._different.nonzero(as_tuple=True)
        counts = zip(cells.tolist(), self._different[cells].tolist(), self._largest[cells].tolist(), strict=True)
        return DifferenceMap(self.rows, self.columns, tuple(counts))


@dataclass
class DifferenceCounts:
    """Adds up the differences of two tensors' blocks.

    The counts are those of `TensorDifference`. `picture` receives the places of the differences, if one is requested;
    `first` is the position of the first element that differs, and both values as text.
    """

    picture: MapBuilder | None = None
    different: int = 0
    signed_zeros: int = 0
    largest: float = 0.0
    first: tuple[int, str, str] | None = None

    def count(self, a: torch.Tensor, b: torch.Tensor, start: int) -> None:
        """Count differences of two 1-D blocks of equal length that begin at element `start` of the tensor."""
        if a.dtype != b.dtype:
            a = a.double()
            b = b.double()
        bits_of_a = bits_of(a)
        bits_of_b = bits_of(b)
        # Most blocks are equal, which a single pass without temporary memory shows.
        if torch.equal(bits_of_a, bits_of_b):
            return
        positions = (bits_of_a != bits_of_b).nonzero().flatten()
        first = a[positions].double()
        second = b[positions].double()
        self.different += len(positions)
        self.signed_zeros += int(((first == 0) & (second == 0)).sum())
        distance = (first - second).abs()
        if self.picture is not None:
            self.picture.add(positions + start, distance)
        finite = distance[torch.isfinite(distance)]
        self.largest = max(self.largest, float(finite.max()) if len(finite) else 0.0)
        if self.first is None:
            self.first = (start + int(positions[0]), repr(float(first[0])), repr(float(second[0])))
