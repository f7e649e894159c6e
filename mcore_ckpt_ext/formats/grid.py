"""The offsets at which the stored parts of a weight begin, on each axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from mcore_ckpt_ext.formats.parts import Weights
from mcore_ckpt_ext.model_space.tensors import WEIGHT


@runtime_checkable
class _WithOffsets(Protocol):
    """Weights that return the offsets of parts without creating slices.

    A large model has very many parts.
    """

    def offsets(self, name: str) -> Iterable[tuple[int, ...]]:
        """Return the offsets of the stored parts of a tensor, on all axes."""


def grid_of(offsets: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the distinct offsets of parts on each axis."""
    return tuple(tuple(sorted(set(axis))) for axis in zip(*offsets, strict=True))


def weight_grid(weights: Weights, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the distinct offsets of the stored parts of a weight on each axis."""
    if isinstance(weights, _WithOffsets):
        return grid_of(weights.offsets(name))
    return grid_of(stored.slice.regions[0].offsets for stored in weights.stored(WEIGHT, name))
