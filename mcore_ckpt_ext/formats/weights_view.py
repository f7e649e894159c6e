"""A model's arrays as data: a view replaces some members and keeps the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mcore_ckpt_ext.formats.parts import Weights
from mcore_ckpt_ext.planning.array_location import Extent, PlainExtent, QuantizedMatrix, ReorderedMatrix
from mcore_ckpt_ext.planning.plan import Copies, StoredSlice, derivation_of, slices_in
from mcore_ckpt_ext.planning.source_view import OfTensor, SourceView


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsView(SourceView):
    """The arrays of a model as replaceable members; `dataclasses.replace` changes some of them.

    Attributes:
        names: returns all names.
        copies: returns the parts of a tensor, and the copies of each part.
    """

    names: Callable[[], list[str]]
    copies: OfTensor[Copies]


def view_of_weights(weights: Weights) -> WeightsView:
    """Return a view with the members of a model's arrays."""
    return WeightsView(
        names=weights.names,
        stored_slices=weights.stored_slices,
        stored_slices_in=partial(slices_in, weights),
        logical_tensor=weights.logical_tensor,
        derivation=partial(derivation_of, weights),
        copies=weights.copies,
    )


def with_file_names(weights: Weights, name_of: Callable[[str], str]) -> WeightsView:
    """Return stored weights with other file names; `name_of` maps each name."""

    def plain(extent: PlainExtent) -> PlainExtent:
        return extent._replace(file=name_of(extent.file))

    def array(extent: PlainExtent | QuantizedMatrix) -> PlainExtent | QuantizedMatrix:
        if isinstance(extent, QuantizedMatrix):
            common = extent.common_scale and plain(extent.common_scale)
            return replace(extent, codes=plain(extent.codes), scales=plain(extent.scales), common_scale=common)
        return plain(extent)

    def move(extent: Extent) -> Extent:
        return replace(extent, array=array(extent.array)) if isinstance(extent, ReorderedMatrix) else array(extent)

    def move_all(slices: Sequence[StoredSlice]) -> list[StoredSlice]:
        return [stored._replace(extent=move(stored.extent)) for stored in slices]

    return replace(
        view_of_weights(weights),
        stored_slices=lambda kind, name: move_all(weights.stored_slices(kind, name)),
        stored_slices_in=lambda kind, region: move_all(slices_in(weights, kind, region)),
        copies=lambda kind, name: [[move_all(copy) for copy in part] for part in weights.copies(kind, name)],
    )
