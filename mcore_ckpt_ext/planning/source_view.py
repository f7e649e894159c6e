"""A source as data: a view replaces some members and keeps the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.plan import Derivation, Source, StoredSlice, derivation_of, slices_in

Answer = TypeVar("Answer", covariant=True)


class OfTensor(Protocol[Answer]):
    """A function of one tensor."""

    def __call__(self, kind: str, name: str) -> Answer:
        """Return the value for the tensor of this kind and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """A source as replaceable members; `dataclasses.replace` changes some of them.

    Attributes:
        stored_slices: returns all slices that contain elements of a tensor.
        stored_slices_in: returns slices that include those with elements of a region.
        logical_tensor: returns the name, shape and dtype of a tensor; None if the source does not contain it.
        derivation: returns the derivation of a tensor; None if it is stored.
    """

    stored_slices: OfTensor[Sequence[StoredSlice]]
    stored_slices_in: Callable[[str, Region], Sequence[StoredSlice]]
    logical_tensor: OfTensor[LogicalTensor | None]
    derivation: OfTensor[Derivation | None]

    @classmethod
    def of(cls, source: Source) -> SourceView:
        """Return a view with the members of a source."""
        return SourceView(
            stored_slices=source.stored_slices,
            stored_slices_in=partial(slices_in, source),
            logical_tensor=source.logical_tensor,
            derivation=partial(derivation_of, source),
        )
