"""Regions and slices: the mapping of a contiguous piece of memory or of a file to logical tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Region:
    """A hyper-rectangle of the logical tensor `name`: offsets and sizes in elements, one per axis."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Region:
        """Return the region that covers a tensor of `shape`."""
        return cls(name, (0,) * len(shape), tuple(shape))

    @classmethod
    def band(cls, name: str, shape: tuple[int, ...], axis: int, start: int, stop: int) -> Region:
        """Return the region from `start` to `stop` along one axis of a tensor of `shape`."""
        offsets = (0,) * len(shape)
        return cls(
            name,
            (*offsets[:axis], start, *offsets[axis + 1 :]),
            (*shape[:axis], stop - start, *shape[axis + 1 :]),
        )


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `[start, stop)` of the concatenated row-major flattenings of `regions`.

    A rank's local parameter is such a flattening: of one region for most parameters, of two for a SwiGLU `linear_fc1`
    (the rank's rows of the gate, then of the up projection), of several for a Mamba `in_proj`.
    """

    regions: tuple[Region, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def pieces(self) -> Iterable[tuple[Region, int, int, int]]:
        """Yield (region, first element in it, last + 1, first element in this slice) for each region."""
        begin = 0
        for region in self.regions:
            low = max(self.start, begin)
            high = min(self.stop, begin + region.numel)
            if low < high:
                yield region, low - begin, high - begin, low - self.start
            begin += region.numel

    @classmethod
    def whole(cls, regions: tuple[Region, ...]) -> Slice:
        """Return the slice of all elements of the regions."""
        return cls(regions, 0, numel_of(regions))


def numel_of(regions: Iterable[Region]) -> int:
    """Return the number of elements in all regions."""
    return sum(region.numel for region in regions)
