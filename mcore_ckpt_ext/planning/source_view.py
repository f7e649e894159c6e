"""A source as data: its members, of which a view replaces some and keeps the others."""

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
        """Return what the function finds for the tensor of this kind and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """A source as its members; `dataclasses.replace` makes one that differs in some.

    Attributes:
        stored: all slices that hold elements of a tensor.
        stored_in: at least the slices that hold elements of a region.
        logical_tensor: the tensor as the checkpoint knows it; None where it has none of that kind and name.
        derivation: how a tensor is derived; None where it is stored.
    """

    stored: OfTensor[Sequence[StoredSlice]]
    stored_in: Callable[[str, Region], Sequence[StoredSlice]]
    logical_tensor: OfTensor[LogicalTensor | None]
    derivation: OfTensor[Derivation | None]

    @classmethod
    def of(cls, source: Source) -> SourceView:
        """Return a source as its members."""
        return SourceView(
            stored=source.stored,
            stored_in=partial(slices_in, source),
            logical_tensor=source.logical_tensor,
            derivation=partial(derivation_of, source),
        )
