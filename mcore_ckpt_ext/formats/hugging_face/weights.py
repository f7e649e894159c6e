"""The tensors of a Hugging Face folder as slices of Megatron's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod

from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.family import HuggingFaceTensor, parameter_shapes
from mcore_ckpt_ext.formats.hugging_face.folder import StoredTensor
from mcore_ckpt_ext.model_space.names import is_module_buffer
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.array_location import ReorderedMatrix
from mcore_ckpt_ext.planning.plan import StoredOnce, StoredSlice


class ModelSpaceWeights(StoredOnce):
    """The arrays of a Hugging Face folder in model space."""

    kinds: tuple[str, ...] = ()

    def __init__(self, matched: Sequence[tuple[HuggingFaceTensor, StoredTensor]]) -> None:
        self.matched = matched
        shapes = parameter_shapes([tensor for tensor, _ in matched])
        self._slices: dict[str, list[StoredSlice]] = {name: [] for name in shapes}
        for tensor, stored in matched:
            for name, stored_slice in _slices(tensor, stored):
                self._slices[name].append(stored_slice)
        self._tensors = {name: LogicalTensor(name, shape, self._dtype(name)) for name, shape in shapes.items()}

    def _dtype(self, name: str) -> str:
        dtypes = sorted({stored.extent.dtype for stored in self._slices[name]})
        if len(dtypes) > 1:
            raise UnsupportedCheckpointError(
                "tensors that Megatron joins into one parameter have different dtypes",
                found=" and ".join(dtypes),
                where=name,
            )
        return dtypes[0]

    @property
    def dtypes(self) -> list[str]:
        """All dtypes, sorted by their number of elements, largest first."""
        elements: dict[str, int] = {}
        for tensor in self._tensors.values():
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + prod(tensor.shape)
        return sorted(elements, key=lambda dtype: -elements[dtype])

    @property
    def with_uncommon_dtype(self) -> list[LogicalTensor]:
        """Parameters that a job in the most frequent dtype would round, without routers' fp32 biases."""
        most = self.dtypes[0] if self._tensors else "float32"
        tensors = self._tensors.values()
        return [tensor for tensor in tensors if tensor.dtype != most != "float32" and not is_module_buffer(tensor.name)]

    def names(self) -> list[str]:
        """Return all names."""
        return list(self._tensors)

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name, shape and dtype of a weight; None if the folder does not contain it."""
        return self._tensors.get(name) if kind == WEIGHT else None

    @override
    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return self._slices.get(name, []) if kind == WEIGHT else []


def _slices(tensor: HuggingFaceTensor, stored: StoredTensor) -> Iterator[tuple[str, StoredSlice]]:
    """Yield the slices of each parameter in a tensor; the regions of one parameter are adjacent there."""
    transposed = tensor.transposed != stored.is_transposed
    first = stored.first
    for name, regions in groupby(tensor.regions, key=lambda region: region.name):
        parts = tuple(regions)
        part = Slice.whole(parts)
        if transposed or tensor.interleaved > 1 or tensor.shift:
            rows = sum(region.sizes[0] for region in parts)
            columns = prod(parts[0].sizes[1:])
            matrix = ReorderedMatrix(stored.extent, first, rows, columns, transposed, tensor.interleaved, -tensor.shift)
            yield name, StoredSlice(part, matrix, 0)
        else:
            yield name, StoredSlice(part, stored.extent, first)
        first += part.numel
