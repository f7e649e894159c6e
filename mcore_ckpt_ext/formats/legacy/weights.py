"""The weights of a legacy checkpoint: the tensors of all ranks, joined in model space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_parameters import model_space_name
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.rank_arrays import RankArrays
from mcore_ckpt_ext.model_space.anatomy import second_names
from mcore_ckpt_ext.model_space.names import is_extra_state, part_names
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizers.legacy_masters import RankOptimizers
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.storage.tensor_reference import TensorReference


@dataclass(frozen=True)
class RankModel:
    """One model chunk of one rank: its `state_dict`, its tensors' archive, its first decoder layer."""

    tensor: int
    expert: int
    first_layer: int
    chunk: Mapping[str, Any]
    place: StoredObject


class LegacyWeights(RankArrays):
    """The model's arrays, joined from the tensors of all ranks."""

    def __init__(self, ranks: Iterable[RankModel], arguments: JobArguments, layout: ParallelLayout) -> None:
        """Raise UnsupportedCheckpointError if it is unknown how the ranks' parameters form the model."""
        super().__init__(arguments, layout)
        if layout.tensor % layout.expert_tensor:
            raise UnsupportedCheckpointError(
                "legacy rank folders do not record which part of its experts a rank has", found=str(layout)
            )
        self.models: list[tuple[RankModel, list[tuple[str, TensorReference]]]] = []
        for rank in ranks:
            named = self._named_tensors(rank)
            self.models.append((rank, named))
            self.recognize_gates(named)
            for name, value in named:
                self.add(WEIGHT, name, value, rank.tensor, rank.place)

    def names(self) -> list[str]:
        """Return all names."""
        return [name for _, name in self._tensors]

    def registered_names(self) -> list[list[str]]:
        """Return each stored chunk's names in `state_dict` order; for split names, the first part."""
        return [[part_names(name)[0] for name, _ in named] for _, named in self.models]

    def rank_optimizers(self, optimizers_of: Mapping[str, list[Mapping[str, Any]]]) -> list[RankOptimizers]:
        """Return the optimizers in each rank folder, and their parameters.

        Args:
            optimizers_of: the optimizers in the model file of each rank, by the name of the file.
        """
        parameters: dict[str, list[tuple[str, TensorReference]]] = {}
        optimizers: dict[str, RankOptimizers] = {}
        for rank, named in self.models:
            file = rank.place.file
            rank_parameters = parameters.setdefault(file, [])
            twice = second_names(dict(named))
            rank_parameters.extend((name, value) for name, value in named if name not in twice)
            optimizers[file] = RankOptimizers(rank.tensor, rank.place, optimizers_of[file], rank_parameters)
        return list(optimizers.values())

    def _named_tensors(self, rank: RankModel) -> list[tuple[str, TensorReference]]:
        """Return a chunk's tensors with their model-space names, without Transformer Engine's `_extra_state`."""
        named = []
        for local, value in rank.chunk.items():
            if is_extra_state(local):
                continue
            if not isinstance(value, TensorReference):
                raise UnsupportedCheckpointError(
                    "a rank's model is not a plain state dict of Megatron Core",
                    found=f"{type(value).__name__} {local}",
                    where=rank.place.file,
                )
            named.append((self._model_space_name(local, rank), value))
        return named

    def extra_states(self, rank: RankModel) -> list[tuple[str, Any]]:
        """Return the extra states of a chunk's modules, with model-space names."""
        states = ((local, value) for local, value in rank.chunk.items() if is_extra_state(local))
        return [(self._model_space_name(local, rank), value) for local, value in states]

    def _model_space_name(self, local: str, rank: RankModel) -> str:
        experts = (self._arguments.num_experts or 0) // self._layout.expert
        return model_space_name(local, rank.first_layer, rank.expert * experts, self._arguments)
