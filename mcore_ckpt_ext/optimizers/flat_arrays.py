"""Flat arrays of optimizer state, and what can be asked of a state that lies in gradient buffers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from mcore_ckpt_ext.layout.buckets import BucketKey, OptimizerGroup, Placement
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.packing_recovery import RecoveredPacking
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, PARAM_REMAINDER, LogicalTensor
from mcore_ckpt_ext.planning.array_location import Extent
from mcore_ckpt_ext.planning.plan import StoredSlice
from mcore_ckpt_ext.transfer import Transfer

# The masters are called `param` on disk; every other state keeps its name.
KINDS = {"param": FP32_PARAM}
MASTERS = (FP32_PARAM, PARAM_REMAINDER)

# A chained optimizer's number and Megatron's `dp_group_idx`.
GroupKey = tuple[int, int]


class FlatPiece(NamedTuple):
    """Elements `[start, stop)` of a flat array, from element `first` of an extent on."""

    start: int
    stop: int
    extent: Extent
    first: int


@dataclass(frozen=True)
class FlatArray:
    """A flat array of one kind: `numel` elements without end padding. As a source, one tensor without a name."""

    numel: int
    dtype: str
    pieces: tuple[FlatPiece, ...]

    def touching(self, low: int, high: int) -> Sequence[FlatPiece]:
        """The pieces that hold some of the elements `[low, high)`, in their order."""
        if self._is_ascending:
            return self.pieces[bisect_right(self._stops, low) : bisect_left(self._starts, high)]
        return [piece for piece in self.pieces if piece.start < high and low < piece.stop]

    def around(self, low: int, high: int) -> FlatArray:
        """The same array with nothing but the pieces that hold some of the elements `[low, high)`."""
        return replace(self, pieces=tuple(self.touching(low, high)))

    @cached_property
    def _starts(self) -> list[int]:
        return [piece.start for piece in self.pieces]

    @cached_property
    def _stops(self) -> list[int]:
        return [piece.stop for piece in self.pieces]

    @cached_property
    def _is_ascending(self) -> bool:
        return self._starts == sorted(self._starts) and self._stops == sorted(self._stops)

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """All slices that hold elements of a tensor."""
        whole = (Region(name, (0,), (self.numel,)),)
        return [StoredSlice(Slice(whole, piece.start, piece.stop), piece.extent, piece.first) for piece in self.pieces]

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """The tensor as the checkpoint knows it; None where it has none of that kind and name."""
        return LogicalTensor(name, (self.numel,), self.dtype)


@dataclass(frozen=True)
class FlatState:
    """All flat arrays of an optimizer.

    Attributes:
        arrays: by group, then by bucket and kind.
        joined: one array holds a buffer's buckets one after the other, without the padding at their ends.
        chunked: the borders of the pieces tell where parameters begin and end.
    """

    arrays: Mapping[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]]
    joined: bool
    chunked: bool


def kind_of_array(state: str, dtype: str) -> str:
    """The kind of an array by its name on disk and its dtype: masters of int16 are remainders."""
    return PARAM_REMAINDER if state in KINDS and dtype == "int16" else KINDS.get(state, state)


def cut(placement: Placement, array: FlatArray) -> list[StoredSlice]:
    """The parts of a placed parameter that the pieces of its array hold."""
    parts = []
    begin, end = placement.start, placement.stop
    for piece in array.touching(begin, end):
        low, high = max(begin, piece.start), min(end, piece.stop)
        if low < high:  # a piece without elements touches, and holds nothing
            part = Slice(placement.regions, low - begin, high - begin)
            parts.append(StoredSlice(part, piece.extent, piece.first + low - piece.start))
    return parts


class Buffers(Protocol):
    """What can be asked of optimizer state in gradient buffers; `flat_buffers` answers it."""

    @property
    def models(self) -> LocalModels:
        """The local parameters of the ranks that wrote it."""

    @property
    def transfer(self) -> Transfer:
        """Reads its files."""

    @property
    def digests(self) -> Mapping[GroupKey, Mapping[str, Mapping[str, str]]]:
        """What the sidecar recorded at the save: for each group, by parameter and kind."""

    @property
    def groups(self) -> Mapping[GroupKey, OptimizerGroup]:
        """The groups of ranks that stored it."""

    @property
    def arrays(self) -> Mapping[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]]:
        """The stored flat arrays, by group, then by bucket and kind."""

    def names(self, kind: str | None = None) -> list[str]:
        """All parameters with state of one kind; by default, of any."""

    def packing_of(self, group: OptimizerGroup) -> RecoveredPacking:
        """The packing of one group.

        Raises:
            PackingError: it cannot be proven.
        """

    def proposed_packings(self) -> Mapping[GroupKey, RecoveredPacking | None]:
        """The first proposal for each group that sizes and chunk borders allow; nothing of the content is read."""

    def disbelieved(self) -> list[str]:
        """Why the sidecar is not believed, group by group.

        Raises:
            PackingError: a packing cannot be proven.
        """
