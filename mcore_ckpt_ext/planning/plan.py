"""The plan of a transfer as data: the bytes to read from files, and each element's destination.

A plan can be printed, counted, split between workers, passed to the master check, or executed. Making it reads nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from mcore_ckpt_ext.errors import ModelMismatchError, UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.job.differences import SAME_MODEL
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.array_location import Extent
from mcore_ckpt_ext.planning.overlap import Overlaps, Piece, Runs

ITEM_SIZE: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of an element, by dtype: those of all arrays that are read and written; others are refused.

What each kind of file calls them is in `STORAGE_NAMES` (torch archives) and `_DTYPES` (safetensors, zarr).
"""


class StoredSlice(NamedTuple):
    """A slice of model space whose elements are stored contiguously from element `first` of `extent` on."""

    slice: Slice
    extent: Extent
    first: int


@dataclass(frozen=True, slots=True)
class TargetSlice:
    """A slice of model space, of one `kind`, that a destination can hold.

    Attributes:
        slice: the elements, in the order of the destination's memory.
        tensors: the logical tensors of the slice's regions in the target, by name.
        may_pad: whether axis 0 may be longer or shorter than in the checkpoint (padded vocabulary); missing elements
            become zero.
    """

    kind: str
    slice: Slice
    tensors: Mapping[str, LogicalTensor]
    may_pad: bool = False


class Source(Protocol):
    """Protocol of the checkpoints that a plan reads."""

    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return all slices that contain elements of a tensor."""

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name, shape and dtype of a tensor; None if the source does not contain it."""


Copies = list[list[list[StoredSlice]]]
"""The parts of a tensor, the copies of each part, and the slices of each copy."""


class Derivation(Protocol):
    """Computes a tensor that is not stored from stored tensors."""

    def inputs(self, wanted: TargetSlice) -> Sequence[tuple[Source, TargetSlice]]:
        """Return the sources and slices to read for a slice of the tensor."""

    def values(self, wanted: TargetSlice, inputs: Sequence[Any]) -> Any:
        """Compute the slice as a 1-D tensor from 1-D tensors of the inputs, in their order."""


@dataclass(frozen=True, slots=True)
class ElementByElement:
    """A derivation of each element from the elements at the same position of other tensors.

    Attributes:
        needs: source and kind of each input, which has the same name and shape.
        compute: computes a 1-D tensor of the values from 1-D tensors of the inputs, in that order.
    """

    needs: tuple[tuple[Source, str], ...]
    compute: Callable[..., Any]

    def inputs(self, wanted: TargetSlice) -> Sequence[tuple[Source, TargetSlice]]:
        """Return the same slice of the other tensors.

        Raises:
            UnreadableCheckpointError: a source does not contain an input.
        """
        return [(source, self._input(source, kind, wanted)) for source, kind in self.needs]

    def values(self, wanted: TargetSlice, inputs: Sequence[Any]) -> Any:
        """Compute the elements from those of the inputs."""
        return self.compute(*inputs)

    def _input(self, source: Source, kind: str, target: TargetSlice) -> TargetSlice:
        tensors = {}
        for name, tensor in target.tensors.items():
            input_tensor = source.logical_tensor(kind, name)
            if input_tensor is None:
                raise UnreadableCheckpointError(
                    "a tensor cannot be derived: its inputs are not in the checkpoint",
                    expected=f"{kind} {name}",
                    where=f"{target.kind} {name}",
                    hint="the checkpoint is incomplete or damaged: use another iteration",
                )
            tensors[name] = replace(input_tensor, shape=tensor.shape)
        return replace(target, kind=kind, tensors=tensors)


@runtime_checkable
class DerivedSource(Protocol):
    """A source in which some tensors are derived from others, not stored."""

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """Return the derivation of a tensor; None if the tensor is stored."""


@runtime_checkable
class IndexedSource(Protocol):
    """A source that selects the slices for a region itself: an array may have thousands of slices."""

    def stored_slices_in(self, kind: str, region: Region) -> Sequence[StoredSlice]:
        """Return at least the slices that contain elements of the region, in the order of `stored`."""


class StoredOnce(ABC):
    """Base of sources without replicas: elements are stored once, or copies cannot be distinguished."""

    @abstractmethod
    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return all slices that contain elements of a tensor."""

    def copies(self, kind: str, name: str) -> Copies:
        """Return a tensor as one part in one copy."""
        return [[list(self.stored_slices(kind, name))]]


class OneCopy:
    """One copy of a part of a tensor as a separate source."""

    def __init__(self, tensor: LogicalTensor, slices: Sequence[StoredSlice]) -> None:
        self._tensor = tensor
        self._slices = slices

    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return all slices that contain elements of a tensor."""
        return self._slices

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name, shape and dtype of the tensor."""
        return self._tensor


class PlannedRead(NamedTuple):
    """Runs from one stored array to the destination with index `target`."""

    extent: Extent
    target: int
    runs: Runs


class ZeroFill(NamedTuple):
    """Elements `[start, stop)` of the destination with index `target`, which become zero."""

    target: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """Reads sorted by file and offset, and zero fills; counts are exact."""

    wanted: Sequence[TargetSlice]
    reads: list[PlannedRead]
    fills: list[ZeroFill] = field(default_factory=list)

    @property
    def bytes_read(self) -> int:
        """Payload bytes that executing the plan reads."""
        return sum(read.runs.numel * ITEM_SIZE[read.extent.dtype] for read in self.reads)

    def part_of_kind(self, kind: str) -> Plan:
        """Return the part of the plan for destinations of one kind, with unchanged target indices."""
        chosen = {index for index, target in enumerate(self.wanted) if target.kind == kind}
        return Plan(
            self.wanted,
            [read for read in self.reads if read.target in chosen],
            [fill for fill in self.fills if fill.target in chosen],
        )


def named_tensor(source: Source, kind: str, name: str) -> LogicalTensor:
    """Return a tensor whose name the source lists.

    Raises:
        UnsupportedCheckpointError: the source does not contain it.
    """
    tensor = source.logical_tensor(kind, name)
    if tensor is None:
        raise UnsupportedCheckpointError(
            "the checkpoint lists a tensor that it does not contain", where=f"{kind} {name}"
        )
    return tensor


def derivation_of(source: Source, kind: str, name: str) -> Derivation | None:
    """Return a source's derivation of a tensor; None if the tensor is stored."""
    return source.derivation(kind, name) if _is_derived(source) else None


# Cached for each class, because Python's check of a protocol inspects all members of the class every time.
_implements: Callable[[Any, Any], bool] = cache(issubclass)


def _is_derived(source: object) -> TypeGuard[DerivedSource]:
    return _implements(type(source), DerivedSource)


def _is_indexed(source: object) -> TypeGuard[IndexedSource]:
    return _implements(type(source), IndexedSource)


def slices_in(source: Source, kind: str, region: Region) -> Sequence[StoredSlice]:
    """Return slices of a source that include those with elements of a region."""
    return source.stored_slices_in(kind, region) if _is_indexed(source) else source.stored_slices(kind, region.name)


def plans_of(wanted: TargetSlice, source: Source, accept_lost: bool = False) -> list[Plan]:
    """Return the plans of the reads for one slice: its own, or those of all inputs if it is derived.

    Raises:
        ModelMismatchError: see `make_plan`.
    """
    derivation = derivation_of(source, wanted.kind, wanted.slice.regions[0].name)
    if derivation is None:
        return [make_plan([wanted], source, accept_lost)]
    needs = (plans_of(needed, input_source, accept_lost) for input_source, needed in derivation.inputs(wanted))
    return [plan for plans in needs for plan in plans]


def make_plan(wanted: Sequence[TargetSlice], source: Source, accept_lost: bool = False) -> Plan:
    """Plan the transfer of all requested slices; every element is copied exactly once.

    Args:
        wanted: the slices to fill.
        source: the checkpoint.
        accept_lost: whether elements that the checkpoint lacks become zero instead of an error.

    Raises:
        ModelMismatchError: the source lacks a tensor or a part of it, or has it in another shape.
    """
    planner = _Planner(source, accept_lost)
    for index, target in enumerate(wanted):
        planner.add(index, target)
    planner.reads.sort(key=lambda read: (read.extent.file, read.extent.offset))
    return Plan(wanted, planner.reads, planner.fills)


class _Planner:
    """Collects the reads and fills of slices, one after the other."""

    def __init__(self, source: Source, accept_lost: bool) -> None:
        self.reads: list[PlannedRead] = []
        self.fills: list[ZeroFill] = []
        self._source = source
        self._accept_lost = accept_lost
        self._overlaps = Overlaps()

    def add(self, index: int, target: TargetSlice) -> None:
        """Plan the reads of the slice with that index."""
        for region, start, stop, begin in target.slice.pieces():
            self._add_piece(index, target, Piece(region, start, stop, begin))

    def _add_piece(self, index: int, target: TargetSlice, piece: Piece) -> None:
        name = piece.region.name
        stored_tensor = _checked_tensor(target, name, self._source)
        if derivation_of(self._source, target.kind, name) is not None:
            raise UnsupportedCheckpointError(
                "internal error: no stored bytes for a derived tensor",
                where=f"{target.kind} {name}",
                hint="this is a bug in this package: please report it",
            )
        extents: list[Extent] = []
        stored_pieces: list[Piece] = []
        for stored in slices_in(self._source, target.kind, piece.region):
            for region, start, stop, begin in stored.slice.pieces():
                if region.name == name:
                    extents.append(stored.extent)
                    stored_pieces.append(Piece(region, start, stop, stored.first + begin))
        shape = target.tensors[name].shape
        coverage = self._overlaps.of(shape, piece, stored_pieces)
        self.reads += [PlannedRead(extents[source], index, runs) for source, runs in coverage.runs]
        stored_numel = prod(stored_tensor.shape)
        for (first, end), position in zip(coverage.missing, coverage.missing_at, strict=True):
            is_padding = target.may_pad and first >= stored_numel
            if not (self._accept_lost or is_padding):
                raise ModelMismatchError(
                    "the checkpoint does not contain every element of a tensor",
                    found=f"nothing for elements {first} to {end}",
                    expected=f"{shape} elements of {stored_tensor.dtype}",
                    where=f"{target.kind} {name}",
                    hint="the checkpoint is incomplete: resume from another iteration",
                )
            self.fills.append(ZeroFill(index, position, position + end - first))


def _checked_tensor(target: TargetSlice, name: str, source: Source) -> LogicalTensor:
    """Return the source's tensor, after a check that the target can have its shape."""
    expected = target.tensors[name]
    tensor = source.logical_tensor(target.kind, name)
    if tensor is None:
        raise ModelMismatchError(
            "the model has a parameter that the checkpoint lacks",
            expected=f"a tensor of shape {expected.shape}",
            where=f"{target.kind} {name}",
            hint=SAME_MODEL,
        )
    differs_in_padding = target.may_pad and len(expected.shape) > 0 and tensor.shape[1:] == expected.shape[1:]
    if tensor.shape != expected.shape and not differs_in_padding:
        raise ModelMismatchError(
            "a parameter has different shapes in the model and the checkpoint",
            found=f"{tensor.shape} in the checkpoint",
            expected=f"{expected.shape}",
            where=f"{target.kind} {name}",
            hint=SAME_MODEL,
        )
    return tensor
