"""The offsets at which the stored parts of a weight begin, on each axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import prod
from operator import ne, sub
from typing import Any, Protocol, TypeGuard, runtime_checkable

from mcore_ckpt_ext.formats.parts import Weights
from mcore_ckpt_ext.model_space.tensors import WEIGHT

Offsets = tuple[tuple[int, ...], ...]


@runtime_checkable
class _WithGrids(Protocol):
    """Weights that know the grids of their arrays: a large model has very many slices."""

    def grid(self, name: str) -> Offsets | None:
        """Return the `full_grid` of the stored parts of a tensor."""


# Cached for each class, because Python's check of a protocol inspects all members of the class every time.
_offers: Callable[[Any, Any], bool] = cache(issubclass)


def _has_grids(weights: object) -> TypeGuard[_WithGrids]:
    return _offers(type(weights), _WithGrids)


def full_grid(shape: Sequence[int], bounds: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Offsets | None:
    """Return the distinct offsets on each axis of parts that form a grid.

    They are the cells of the grid, each once, and cover the array.

    Args:
        shape: the shape of the array.
        bounds: the offsets and the sizes of all parts, by axis.

    Returns:
        None for other parts, and for an array without axes.
    """
    grid = tuple(tuple(sorted(set(offsets))) for offsets, _ in bounds)
    for begins, (offsets, sizes), end in zip(grid, bounds, shape, strict=True):
        if not begins or begins[0] != 0 or begins[-1] > end:
            return None
        size_at = dict(zip(begins, map(sub, (*begins[1:], end), begins), strict=True))
        if any(map(ne, sizes, map(size_at.__getitem__, offsets))):
            return None
    cells = list(zip(*(offsets for offsets, _ in bounds), strict=True))
    return grid if prod(map(len, grid)) == len(cells) == len(set(cells)) else None


@lru_cache(maxsize=1 << 10)  # the weights of a model have few grids
def _distinct(offsets: Offsets) -> Offsets:
    return tuple(tuple(sorted(set(axis))) for axis in zip(*offsets, strict=True))


def known_grid(weights: Weights, name: str) -> Offsets | None:
    """Return the `full_grid` of a weight's stored parts; None if finding it takes slices."""
    return weights.grid(name) if _has_grids(weights) else None


def weight_grid(weights: Weights, name: str) -> Offsets:
    """Return the distinct offsets of the stored parts of a weight on each axis."""
    if (grid := known_grid(weights, name)) is not None:
        return grid
    return _distinct(tuple(stored.slice.regions[0].offsets for stored in weights.stored_slices(WEIGHT, name)))
