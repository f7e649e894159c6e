"""The plan of a transfer as data: what is read from which file, and where each element goes.

A plan can be printed, counted, split between workers, walked by the proof, or executed; making it reads nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

from mcore_ckpt_ext.errors import ModelMismatchError, UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.array_location import Extent
from mcore_ckpt_ext.planning.overlap import Overlaps, Piece, Runs

ITEM_SIZE: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice of model space whose elements lie one after the other from element `first` of `extent`."""

    slice: Slice
    extent: Extent
    first: int


@dataclass(frozen=True, slots=True)
class TargetSlice:
    """A slice of model space, of one `kind`, that a destination has room for.

    Attributes:
        slice: the elements, in the order of the destination's memory.
        tensors: the logical tensors of the slice's regions as the target knows them, by name.
        may_pad: axis 0 may be longer or shorter than in the checkpoint (padded vocabulary); what the
            checkpoint does not have becomes zero.
    """

    kind: str
    slice: Slice
    tensors: Mapping[str, LogicalTensor]
    may_pad: bool = False


class Source(Protocol):
    """Protocol of the checkpoints that a plan reads."""

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """All slices that hold elements of a tensor."""

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """The tensor as the checkpoint knows it; None where it has none of that kind and name."""


Copies = list[list[list[StoredSlice]]]
"""The parts of a tensor, the copies of each part, and the slices that hold each copy."""


class Derivation(Protocol):
    """How the values of a tensor that is stored nowhere follow from stored ones."""

    def inputs(self, wanted: TargetSlice) -> Sequence[tuple[Source, TargetSlice]]:
        """What has to be read for a slice of the tensor, and from where."""

    def values(self, wanted: TargetSlice, inputs: Sequence[Any]) -> Any:
        """The slice as a 1-D tensor, computed from 1-D tensors of the inputs, in their order."""


@dataclass(frozen=True, slots=True)
class ElementByElement:
    """A derivation of each element from those that have its place in other tensors.

    Attributes:
        needs: where each input comes from, by source and kind; of the same name and shape.
        compute: from 1-D tensors of the inputs, in that order, to a 1-D tensor of the values.
    """

    needs: tuple[tuple[Source, str], ...]
    compute: Callable[..., Any]

    def inputs(self, wanted: TargetSlice) -> Sequence[tuple[Source, TargetSlice]]:
        """The same slice of the other tensors.

        Raises:
            UnreadableCheckpointError: one of them is not there.
        """
        return [(source, self._input(source, kind, wanted)) for source, kind in self.needs]

    def values(self, wanted: TargetSlice, inputs: Sequence[Any]) -> Any:
        """The elements, computed from those of the inputs."""
        return self.compute(*inputs)

    def _input(self, source: Source, kind: str, wanted: TargetSlice) -> TargetSlice:
        tensors = {}
        for name, tensor in wanted.tensors.items():
            own = source.logical_tensor(kind, name)
            if own is None:
                raise UnreadableCheckpointError(
                    "a tensor cannot be derived: its inputs are not in the checkpoint",
                    expected=f"{kind} {name}",
                    where=f"{wanted.kind} {name}",
                    hint="the checkpoint is incomplete or damaged: use another iteration",
                )
            tensors[name] = replace(own, shape=tensor.shape)
        return replace(wanted, kind=kind, tensors=tensors)


@runtime_checkable
class DerivedSource(Protocol):
    """A source in which some tensors are derived from others, not stored."""

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """How a tensor is derived; None where it is stored. What `stored` answers is then what it is made from."""


@runtime_checkable
class IndexedSource(Protocol):
    """A source that finds by itself which of its slices may hold elements of a region; an array may have thousands."""

    def stored_in(self, kind: str, region: Region) -> Sequence[StoredSlice]:
        """At least the slices that do, in the order of `stored`."""


class StoredOnce(ABC):
    """Base of sources without replicas: each element is stored once, or its copies cannot be distinguished."""

    @abstractmethod
    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return all slices that hold elements of a tensor."""

    def copies(self, kind: str, name: str) -> Copies:
        """A tensor as one part in one copy."""
        return [[list(self.stored(kind, name))]]


class OneCopy:
    """One copy of a part of a tensor as a source of its own."""

    def __init__(self, tensor: LogicalTensor, slices: Sequence[StoredSlice]) -> None:
        self._tensor, self._slices = tensor, slices

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """All slices that hold elements of a tensor."""
        return self._slices

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """The tensor as the checkpoint knows it; None where it has none of that kind and name."""
        return self._tensor


@dataclass(frozen=True, slots=True)
class Copy:
    """Runs from one stored array to the destination with index `target`."""

    extent: Extent
    target: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class ZeroFill:
    """Elements `[start, stop)` of the destination with index `target` become zero."""

    target: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """Copies sorted by file and offset, and fills; counts are exact."""

    wanted: Sequence[TargetSlice]
    copies: list[Copy]
    fills: list[ZeroFill] = field(default_factory=list)

    @property
    def bytes_read(self) -> int:
        """Payload bytes that executing the plan reads."""
        return sum(copy.runs.numel * ITEM_SIZE[copy.extent.dtype] for copy in self.copies)

    def of_kind(self, kind: str) -> Plan:
        """The part of the plan whose destinations are of one kind; target indices stay as they are."""
        chosen = {index for index, wanted in enumerate(self.wanted) if wanted.kind == kind}
        return Plan(
            self.wanted,
            [copy for copy in self.copies if copy.target in chosen],
            [fill for fill in self.fills if fill.target in chosen],
        )


def derivation_of(source: Source, kind: str, name: str) -> Derivation | None:
    """How a source derives a tensor; None where it stores it."""
    return source.derivation(kind, name) if _is_deriving(source) else None


# For each class once: Python looks through all of a class whenever it is asked whether it offers what a protocol says.
_offers: Callable[[Any, Any], bool] = cache(issubclass)


def _is_deriving(source: object) -> TypeGuard[DerivedSource]:
    return _offers(type(source), DerivedSource)


def _is_selecting(source: object) -> TypeGuard[IndexedSource]:
    return _offers(type(source), IndexedSource)


def slices_in(source: Source, kind: str, region: Region) -> Sequence[StoredSlice]:
    """The slices of a source that may hold elements of a region; all of its tensor where it cannot select them."""
    return source.stored_in(kind, region) if _is_selecting(source) else source.stored(kind, region.name)


def plans_of(wanted: TargetSlice, source: Source, accept_lost: bool = False) -> list[Plan]:
    """What is read for one slice: its own plan or, where it is derived, the plans of everything that it is made from.

    Raises:
        ModelMismatchError: see `make_plan`.
    """
    derivation = derivation_of(source, wanted.kind, wanted.slice.regions[0].name)
    if derivation is None:
        return [make_plan([wanted], source, accept_lost)]
    needs = (plans_of(needed, own, accept_lost) for own, needed in derivation.inputs(wanted))
    return [plan for plans in needs for plan in plans]


def make_plan(wanted: Sequence[TargetSlice], source: Source, accept_lost: bool = False) -> Plan:
    """Plan the transfer of every wanted slice; every element is served exactly once.

    Args:
        wanted: what is to be filled.
        source: the checkpoint.
        accept_lost: elements that the checkpoint does not hold become fills instead of an error.

    Raises:
        ModelMismatchError: the source lacks a tensor, has it in another shape, or lacks part of it.
    """
    copies: list[Copy] = []
    fills: list[ZeroFill] = []
    overlaps = Overlaps()
    for index, want in enumerate(wanted):
        for region, start, stop, begin in want.slice.pieces():
            target = Piece(region, start, stop, begin)
            tensor = _checked_tensor(want, region.name, source)
            if derivation_of(source, want.kind, region.name) is not None:
                raise UnsupportedCheckpointError(
                    "internal error: no stored bytes for a derived tensor",
                    where=f"{want.kind} {region.name}",
                    hint="this is a bug in this package: please report it",
                )
            _plan_piece(index, want, target, tensor, source, accept_lost, overlaps, copies, fills)
    copies.sort(key=lambda copy: (copy.extent.file, copy.extent.offset))
    return Plan(wanted, copies, fills)


def _plan_piece(
    index: int, want: TargetSlice, target: Piece, tensor: LogicalTensor, source: Source, accept_lost: bool,
    overlaps: Overlaps, copies: list[Copy], fills: list[ZeroFill],
) -> None:  # fmt: skip
    name = target.region.name
    extents: list[Extent] = []
    pieces: list[Piece] = []
    for stored in slices_in(source, want.kind, target.region):
        for region, start, stop, begin in stored.slice.pieces():
            if region.name == name:
                extents.append(stored.extent)
                pieces.append(Piece(region, start, stop, stored.first + begin))
    found = overlaps.of(want.tensors[name].shape, target, pieces)
    copies.extend(Copy(extents[at], index, runs) for at, runs in found.runs)
    held = _numel(tensor.shape)
    for (low, high), at in zip(found.missing, found.missing_at, strict=True):
        if not (accept_lost or (want.may_pad and low >= held)):
            raise ModelMismatchError(
                "the checkpoint does not contain every element of a tensor",
                found=f"nothing for elements {low} to {high}",
                expected=f"{want.tensors[name].shape} elements of {tensor.dtype}",
                where=f"{want.kind} {name}",
                hint="the checkpoint is incomplete: resume from another iteration",
            )
        fills.append(ZeroFill(index, at, at + high - low))


def _checked_tensor(want: TargetSlice, name: str, source: Source) -> LogicalTensor:
    """The source's tensor, if the target can take its shape."""
    live = want.tensors[name]
    tensor = source.logical_tensor(want.kind, name)
    if tensor is None:
        raise ModelMismatchError(
            "the model has a parameter that the checkpoint lacks",
            expected=f"a tensor of shape {live.shape}",
            where=f"{want.kind} {name}",
            hint="resume with the model arguments that the checkpoint was written with",
        )
    same = tensor.shape == live.shape
    if not same and not (want.may_pad and len(live.shape) > 0 and tensor.shape[1:] == live.shape[1:]):
        raise ModelMismatchError(
            "a parameter has different shapes in the model and the checkpoint",
            found=f"{tensor.shape} in the checkpoint",
            expected=f"{live.shape}",
            where=f"{want.kind} {name}",
            hint="resume with the model arguments that the checkpoint was written with",
        )
    return tensor


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
