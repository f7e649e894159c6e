"""Arrays that ranks stored in parts under their own shapes, joined in model space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_parameters import TensorPart, regions_of, tower_gates
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_parts import parts_of
from mcore_ckpt_ext.model_space.names import is_of_experts
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.plan import Copies, StoredSlice
from mcore_ckpt_ext.storage.dcp_index import extent_of
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.storage.tensor_reference import TensorReference


class RankArrays:
    """Arrays joined from the ranks' parts; of equal parts of several ranks, the first is read."""

    def __init__(self, arguments: JobArguments, layout: ParallelLayout) -> None:
        self._arguments = arguments
        self._layout = layout
        self._gated_in_towers: dict[str, bool] = {}
        self._tensors: dict[tuple[str, str], LogicalTensor] = {}
        self._copies: dict[tuple[str, str], dict[Region, list[StoredSlice]]] = {}

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name, shape and dtype of a tensor; None if the checkpoint does not contain it."""
        return self._tensors.get((kind, name))

    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return all slices that contain elements of a tensor."""
        return [copies[0] for copies in self._copies.get((kind, name), {}).values()]

    def copies(self, kind: str, name: str) -> Copies:
        """Return all copies of each part of a tensor: tensor-parallel replicas, tied embeddings, experts."""
        return [[[copy] for copy in copies] for copies in self._copies.get((kind, name), {}).values()]

    def recognize_gates(self, weights: Iterable[tuple[str, TensorReference]]) -> None:
        """Recognize gated linears of towers by the shapes of one rank's weights; call it before `add`."""
        self._gated_in_towers |= tower_gates({name: value.shape for name, value in weights})

    def add(self, kind: str, name: str, value: TensorReference, tensor_rank: int, place: StoredObject) -> None:
        """Add one rank's part of a tensor, or of all tensors into which model space splits it.

        Raises:
            UnsupportedCheckpointError: the tensor-parallel split is unknown.
            UnreadableCheckpointError: the ranks disagree about the tensor.
        """
        extent = extent_of(value, place)
        first = value.offset
        rank_part = self._part(name, tensor_rank)
        for part_name, local_shape in parts_of(name, value.shape, rank_part.ranks, self._arguments).items():
            shape, regions = regions_of(part_name, local_shape, rank_part, self._arguments)
            tensor = LogicalTensor(part_name, shape, extent.dtype)
            if self._tensors.setdefault((kind, part_name), tensor) != tensor or not value.is_contiguous:
                raise UnreadableCheckpointError(
                    "a tensor has different shapes or dtypes on different ranks",
                    found=f"{shape} of {extent.dtype}",
                    expected=str(self._tensors[kind, part_name]),
                    where=f"{kind} {part_name}, {place.file}",
                )
            copies = self._copies.setdefault((kind, part_name), {})
            for region in regions:
                copies.setdefault(region, []).append(StoredSlice(Slice.whole((region,)), extent, first))
                first += region.numel

    def _part(self, name: str, tensor_rank: int) -> TensorPart:
        """Return the rank's part; expert-tensor ranks, which share experts, vary fastest (parallel_state.py)."""
        ranks = self._layout.expert_tensor if is_of_experts(name) else self._layout.tensor
        return TensorPart(tensor_rank % ranks, ranks, self._gated_in_towers.get(name))
