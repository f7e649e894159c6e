"""The weights of a legacy checkpoint: each rank's own tensors, put together in model space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.dcp_index import StoredObject, extent_of
from mcore_ckpt_ext.layout.local_parameters import TensorPart, model_space_name, regions_of
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.plan import StoredSlice
from mcore_ckpt_ext.storage.safe_pickle import TensorReference

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class RankModel:
    """One model chunk of one rank: its `state_dict`, the archive of its tensors, and its first decoder layer."""

    tensor: int
    expert: int
    first_layer: int
    chunk: Mapping[str, Any]
    place: StoredObject


class RankArrays:
    """Arrays put together from the ranks' parts. What several ranks stored alike is read from the first of them."""

    def __init__(self, arguments: Mapping[str, Any], layout: ParallelLayout) -> None:
        self._arguments = arguments
        self._layout = layout
        self._tensors: dict[tuple[str, str], LogicalTensor] = {}
        self._copies: dict[tuple[str, str], dict[Region, list[StoredSlice]]] = {}

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """See `planning.plan.Source`."""
        return self._tensors.get((kind, name))

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """See `planning.plan.Source`."""
        return [copies[0] for copies in self.copies(kind, name)]

    def copies(self, kind: str, name: str) -> list[list[StoredSlice]]:
        """For each stored part of a tensor all its copies: tensor-parallel ranks, tied embeddings, expert ranks."""
        return list(self._copies.get((kind, name), {}).values())

    def add(self, kind: str, name: str, value: TensorReference, tensor_rank: int, place: StoredObject) -> None:
        """File one rank's part of a tensor.

        Raises:
            UnsupportedCheckpointError: no rule says which part it is.
            UnreadableCheckpointError: the ranks disagree about the tensor.
        """
        shape, regions = regions_of(name, value.shape, self._part(name, tensor_rank), self._arguments)
        extent = extent_of(value, place)
        tensor = LogicalTensor(name, shape, extent.dtype)
        if self._tensors.setdefault((kind, name), tensor) != tensor or not value.is_contiguous:
            raise UnreadableCheckpointError(
                "ranks of the checkpoint disagree about a tensor",
                found=f"{shape} of {extent.dtype}",
                expected=str(self._tensors[kind, name]),
                where=f"{kind} {name}, {place.file}",
            )
        first = value.offset
        for region in regions:
            stored = StoredSlice(Slice.whole((region,)), extent, first)
            self._copies.setdefault((kind, name), {}).setdefault(region, []).append(stored)
            first += region.numel

    def _part(self, name: str, tensor_rank: int) -> TensorPart:
        """Experts are cut between the expert-tensor ranks, which run fastest (parallel_state.py)."""
        ranks = self._layout.expert_tensor if ".experts.experts." in name else self._layout.tensor
        return TensorPart(tensor_rank % ranks, ranks)


class LegacyWeights(RankArrays):
    """The model's arrays."""

    def __init__(self, ranks: Iterable[RankModel], arguments: Mapping[str, Any], layout: ParallelLayout) -> None:
        """Raises: UnsupportedCheckpointError, when it is not known how the ranks' parameters make up the model."""
        super().__init__(arguments, layout)
        if layout.tensor % layout.expert_tensor:
            raise UnsupportedCheckpointError(
                "legacy rank folders do not say which part of its experts a rank has", found=str(layout)
            )
        self.models: list[tuple[RankModel, list[tuple[str, TensorReference]]]] = []
        for rank in ranks:
            named = self._named(rank)
            self.models.append((rank, named))
            for name, value in named:
                self.add(WEIGHT, name, value, rank.tensor, rank.place)

    def names(self) -> list[str]:
        """All names."""
        return [name for _, name in self._tensors]

    def registered(self) -> list[list[str]]:
        """Names of every stored model chunk, in the order of its `state_dict`."""
        return [[name for name, _ in named] for _, named in self.models]

    def _named(self, rank: RankModel) -> list[tuple[str, TensorReference]]:
        """A chunk's tensors with their model-space names; Transformer Engine's `_extra_state` carries no weights."""
        named = []
        for local, value in rank.chunk.items():
            if local.endswith(_EXTRA_STATE):
                continue
            if not isinstance(value, TensorReference):
                raise UnsupportedCheckpointError(
                    "a rank's model is no plain state dict of Megatron Core",
                    found=f"{type(value).__name__} {local}",
                    where=rank.place.file,
                )
            named.append((self._model_space_name(local, rank), value))
        return named

    def extra_states(self, rank: RankModel) -> list[tuple[str, Any]]:
        """What a chunk's modules stored beside their parameters, with model-space names."""
        states = ((local, value) for local, value in rank.chunk.items() if local.endswith(_EXTRA_STATE))
        return [(self._model_space_name(local, rank), value) for local, value in states]

    def _model_space_name(self, local: str, rank: RankModel) -> str:
        experts = int(self._arguments.get("num_experts") or 0) // self._layout.expert
        return model_space_name(local, rank.first_layer, rank.expert * experts, self._arguments)
