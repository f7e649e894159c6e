"""Flat arrays of optimizer state, and the interface of state in gradient buffers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import NamedTuple, Protocol, overload

from typing_extensions import override

from mcore_ckpt_ext.layout.buckets import BucketKey, OptimizerGroup, Placement
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.packing_recovery import RecoveredPacking
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, PARAM_REMAINDER, STALE_MASTER, LogicalTensor
from mcore_ckpt_ext.planning.array_location import Extent
from mcore_ckpt_ext.planning.plan import StoredSlice
from mcore_ckpt_ext.storage.index_entries import StoredChunk
from mcore_ckpt_ext.transfer import Transfer

# Masters are named `param` on disk; every other state has its own name.
KINDS = {"param": FP32_PARAM}
MASTERS = (FP32_PARAM, PARAM_REMAINDER, STALE_MASTER)

# The number of a chained optimizer, and Megatron's `dp_group_idx`.
GroupKey = tuple[int, int]


class FlatPiece(NamedTuple):
    """Elements `[start, stop)` of a flat array, from element `first` of an extent on."""

    start: int
    stop: int
    extent: Extent
    first: int


class ChunkPieces(Sequence[FlatPiece]):
    """The chunks of a stored array with one axis as pieces, which become objects on access.

    Attributes:
        starts: where each piece starts in the flat array.
        stops: where it stops.
    """

    def __init__(self, starts: Sequence[int], stops: Sequence[int], chunks: Sequence[StoredChunk]) -> None:
        self.starts = starts
        self.stops = stops
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, index: int) -> FlatPiece: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[FlatPiece]: ...

    @override
    def __getitem__(self, index: int | slice) -> FlatPiece | Sequence[FlatPiece]:
        if isinstance(index, slice):
            return ChunkPieces(self.starts[index], self.stops[index], self._chunks[index])
        return FlatPiece(self.starts[index], self.stops[index], self._chunks[index].extent, 0)

    @override
    def __iter__(self) -> Iterator[FlatPiece]:
        extents = (extent for _, _, extent in self._chunks)
        return map(FlatPiece, self.starts, self.stops, extents, repeat(0))


@dataclass(frozen=True)
class FlatArray:
    """A flat array of one kind: `numel` elements without end padding; as a source, a tensor of any name."""

    numel: int
    dtype: str
    pieces: Sequence[FlatPiece]

    def pieces_overlapping(self, low: int, high: int) -> Sequence[FlatPiece]:
        """Return the pieces that overlap the elements `[low, high)`, in their order."""
        if self._is_ascending:
            return self.pieces[bisect_right(self.stops, low) : bisect_left(self.starts, high)]
        return [piece for piece in self.pieces if piece.start < high and low < piece.stop]

    def around(self, low: int, high: int) -> FlatArray:
        """Return the array with only the pieces that overlap the elements `[low, high)`."""
        return replace(self, pieces=tuple(self.pieces_overlapping(low, high)))

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where each piece starts."""
        return self.pieces.starts if isinstance(self.pieces, ChunkPieces) else [piece.start for piece in self.pieces]

    @cached_property
    def stops(self) -> Sequence[int]:
        """Where each piece stops."""
        return self.pieces.stops if isinstance(self.pieces, ChunkPieces) else [piece.stop for piece in self.pieces]

    @property
    def is_contiguous(self) -> bool:
        """True if each piece starts where the one before it stops, so that they are all elements, once."""
        borders = [*self.starts, self.numel]
        return borders[0] == 0 and borders[1:] == list(self.stops)

    @cached_property
    def _is_ascending(self) -> bool:
        return list(self.starts) == sorted(self.starts) and list(self.stops) == sorted(self.stops)

    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return all slices that contain elements of a tensor."""
        whole = (Region(name, (0,), (self.numel,)),)
        return [StoredSlice(Slice(whole, piece.start, piece.stop), piece.extent, piece.first) for piece in self.pieces]

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name, shape and dtype of the array as a tensor."""
        return LogicalTensor(name, (self.numel,), self.dtype)


@dataclass(frozen=True)
class FlatState:
    """All flat arrays of an optimizer.

    Attributes:
        arrays: by group, then by bucket and kind.
        joined: whether one array contains the concatenated buckets of a buffer, without the padding at their ends.
        chunked: whether parameters begin and end at borders of pieces.
        has_numbers: whether the masters are remainders, stored as numbers in fp32 (`numbers_of_remainders`).
    """

    arrays: Mapping[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]]
    joined: bool
    chunked: bool
    has_numbers: bool = False


def kind_of_array(state: str, dtype: str) -> str:
    """Return the kind of an array by its name on disk and its dtype: int16 masters are remainders."""
    return PARAM_REMAINDER if state in KINDS and dtype == "int16" else KINDS.get(state, state)


def cut(placement: Placement, array: FlatArray) -> list[StoredSlice]:
    """Return the parts of a placed parameter in the pieces of its array."""
    parts = []
    begin = placement.start
    end = placement.stop
    for piece in array.pieces_overlapping(begin, end):
        low = max(begin, piece.start)
        high = min(end, piece.stop)
        if low < high:  # an empty piece overlaps, but contains nothing
            part = Slice(placement.regions, low - begin, high - begin)
            parts.append(StoredSlice(part, piece.extent, piece.first + low - piece.start))
    return parts


class Buffers(Protocol):
    """The interface of optimizer state in gradient buffers, implemented by `flat_buffers`."""

    @property
    def models(self) -> LocalModels:
        """The local parameters of the ranks that wrote it."""

    @property
    def transfer(self) -> Transfer:
        """Reads its files."""

    @property
    def digests(self) -> Mapping[GroupKey, Mapping[str, Mapping[str, str]]]:
        """The digests that the sidecar recorded at the save: by group, parameter and kind."""

    @property
    def groups(self) -> Mapping[GroupKey, OptimizerGroup]:
        """The groups of ranks that stored it."""

    @property
    def arrays(self) -> Mapping[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]]:
        """The stored flat arrays, by group, then by bucket and kind."""

    def names(self, kind: str | None = None) -> list[str]:
        """Return all parameters with state of one kind; by default, of any."""

    def packing_of(self, group: OptimizerGroup) -> RecoveredPacking:
        """Return the packing of one group.

        Raises:
            PackingError: no packing can be verified.
        """

    def proposed_packings(self) -> Mapping[GroupKey, RecoveredPacking | None]:
        """Return each group's first candidate that fits sizes and chunk borders, without reading content."""

    def sidecar_problems(self) -> list[str]:
        """Return why the sidecar's packing is rejected, for each group.

        Raises:
            PackingError: the packing of a group cannot be verified.
        """
