"""Where the stored parts of a weight begin, axis by axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from mcore_ckpt_ext.formats.parts import Weights
from mcore_ckpt_ext.model_space.tensors import WEIGHT


@runtime_checkable
class _WithOffsets(Protocol):
    """Weights that show where parts begin without making slices of them; a large model has very many."""

    def offsets(self, name: str) -> Iterable[tuple[int, ...]]:
        """Where the stored parts of a tensor begin, by axis."""


def grid_of(offsets: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The distinct offsets of parts, axis by axis."""
    return tuple(tuple(sorted(set(axis))) for axis in zip(*offsets, strict=True))


def weight_grid(weights: Weights, name: str) -> tuple[tuple[int, ...], ...]:
    """The distinct offsets of the stored parts of a weight, axis by axis."""
    if isinstance(weights, _WithOffsets):
        return grid_of(weights.offsets(name))
    return grid_of(stored.slice.regions[0].offsets for stored in weights.stored(WEIGHT, name))
