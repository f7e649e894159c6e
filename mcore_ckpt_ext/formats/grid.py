"""The offsets at which the stored parts of a weight begin, on each axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

from mcore_ckpt_ext.formats.parts import Weights
from mcore_ckpt_ext.model_space.tensors import WEIGHT

Offsets = tuple[tuple[int, ...], ...]


@runtime_checkable
class _WithOffsets(Protocol):
    """Weights that return the offsets of parts without creating slices.

    A large model has very many parts.
    """

    def offsets(self, name: str) -> Iterable[tuple[int, ...]]:
        """Return the offsets of the stored parts of a tensor, on all axes."""


# Cached for each class, because Python's check of a protocol inspects all members of the class every time.
_offers: Callable[[Any, Any], bool] = cache(issubclass)


def _lists_offsets(weights: object) -> TypeGuard[_WithOffsets]:
    return _offers(type(weights), _WithOffsets)


@lru_cache(maxsize=1 << 10)  # the weights of a model have few grids
def grid_of(offsets: Offsets) -> Offsets:
    """Return the distinct offsets of parts on each axis."""
    return tuple(tuple(sorted(set(axis))) for axis in zip(*offsets, strict=True))


def weight_grid(weights: Weights, name: str) -> Offsets:
    """Return the distinct offsets of the stored parts of a weight on each axis."""
    if _lists_offsets(weights):
        return grid_of(tuple(weights.offsets(name)))
    return grid_of(tuple(stored.slice.regions[0].offsets for stored in weights.stored_slices(WEIGHT, name)))
