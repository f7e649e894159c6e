"""A model's arrays as another model has them: every question goes to the other one, but for what a class overrides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from typing_extensions import override

from mcore_ckpt_ext.formats.parts import Weights
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.array_location import Extent, PlainExtent, ScaleCodec, TransposeCodec
from mcore_ckpt_ext.planning.plan import Copies, Derivation, StoredSlice, derivation_of, slices_in


class WrappedWeights:
    """The arrays of `weights`."""

    def __init__(self, weights: Weights) -> None:
        self.wrapped = weights

    def names(self) -> list[str]:
        """All names."""
        return self.wrapped.names()

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """The tensor as the checkpoint knows it; None where it has none of that kind and name."""
        return self.wrapped.logical_tensor(kind, name)

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """All slices that hold elements of a tensor."""
        return self.wrapped.stored(kind, name)

    def stored_in(self, kind: str, region: Region) -> Sequence[StoredSlice]:
        """At least the slices that hold elements of a region."""
        return slices_in(self.wrapped, kind, region)

    def copies(self, kind: str, name: str) -> Copies:
        """The parts of a tensor, and the copies of each part."""
        return self.wrapped.copies(kind, name)

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """How a tensor is derived; None where it is stored."""
        return derivation_of(self.wrapped, kind, name)


class RelocatedWeights(WrappedWeights):
    """Stored weights whose files have other names; `name_of` gives the name of each."""

    def __init__(self, weights: Weights, name_of: Callable[[str], str]) -> None:
        super().__init__(weights)
        self._name_of = name_of

    @override
    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return self._relocated(super().stored(kind, name))

    @override
    def stored_in(self, kind: str, region: Region) -> Sequence[StoredSlice]:
        return self._relocated(super().stored_in(kind, region))

    @override
    def copies(self, kind: str, name: str) -> Copies:
        return [[self._relocated(copy) for copy in part] for part in super().copies(kind, name)]

    def _relocated(self, slices: Sequence[StoredSlice]) -> list[StoredSlice]:
        return [replace(one, extent=self._extent(one.extent)) for one in slices]

    def _extent(self, extent: Extent) -> Extent:
        if isinstance(extent, TransposeCodec):
            return replace(extent, array=self._array(extent.array))
        return self._array(extent)

    def _array(self, array: PlainExtent | ScaleCodec) -> PlainExtent | ScaleCodec:
        if isinstance(array, ScaleCodec):
            return replace(array, codes=self._plain(array.codes), scales=self._plain(array.scales))
        return self._plain(array)

    def _plain(self, extent: PlainExtent) -> PlainExtent:
        return extent._replace(file=self._name_of(extent.file))
