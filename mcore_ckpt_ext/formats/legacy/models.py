"""The model on the ranks that will read legacy files: the parameters and parts of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.legacy.ranks import LegacyRank
from mcore_ckpt_ext.formats.legacy.target_parameter_order import order_for
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.job_models import JobModels
from mcore_ckpt_ext.layout.local_parameters import LocalNames
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder, registration_order
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.anatomy import is_in_vocabulary, second_names
from mcore_ckpt_ext.model_space.names import parse
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.plan import TargetSlice, named_tensor
from mcore_ckpt_ext.planning.write_plan import WriteItem
from mcore_ckpt_ext.storage.pickling import DeclaredTensor


class TargetModels:
    """The model chunks of all ranks of the job that will read the files.

    Attributes:
        local: the parameters that gradient buffers can contain.
        order: the order in which that job registers them.
    """

    def __init__(
        self, checkpoint: CheckpointView, arguments: JobArguments, layout: ParallelLayout, version: tuple[int, int]
    ) -> None:
        """Raise UnsupportedCheckpointError if that job's arrangement of the model is unknown."""
        self._checkpoint = checkpoint
        self._arguments = arguments
        self._layout = layout
        self._names = LocalNames(arguments, version)
        tensors = {name: self._padded_tensor(name) for name in checkpoint.model.weights().names()}
        self._twice = second_names(tensors)
        self.local = JobModels(tensors, arguments, layout, version)
        if self.local.predicts_more_tokens:
            raise UnsupportedCheckpointError(
                "the ranks of a legacy checkpoint that hold multi-token prediction are unknown",
                found="parameters of mtp.layers",
                hint="use --to torch_dist, which can be loaded under any layout",
            )
        self.order: ParameterOrder = order_for(checkpoint, arguments, layout.expert > 1, version)

    @property
    def stages(self) -> range:
        """The virtual pipeline stages, each with one model chunk."""
        return range(self._layout.virtual_pipeline)

    def parameters(self, rank: LegacyRank, stage: int) -> list[str]:
        """Return the names of one model chunk's parameters, in the order of registration.

        Raises:
            UnsupportedCheckpointError: the order is unknown, and the optimizer to write needs it.
        """
        chunk = (self.local.chunks or [])[rank.pipeline][stage]
        names = [name for name in chunk if self._holds(rank, name)]
        tied_copy = self.is_last(rank, stage) and self.local.has_tied_copy
        parameters = registration_order(names, self.order, tied_copy=tied_copy)
        if parameters is not None:
            return parameters
        if self._checkpoint.optimizer.format() is None:
            return names  # weights are loaded by name
        raise UnsupportedCheckpointError(
            "the order in which the model registers its parameters is unknown",
            where=f"{rank}",
            hint="use --to torch_dist, which does not depend on the order",
        )

    def module_buffers(self, rank: LegacyRank, stage: int) -> list[str]:
        """Return a chunk's tensors that are not trained parameters.

        These are biases of routers, and second names of tied weights.
        """
        others = [name for name in self._checkpoint.model.weights().names() if name not in self.local.weights]
        return [name for name in others if self.local.chunk_of(name) == (rank.pipeline, stage)]

    def extra_states(self, rank: LegacyRank, stage: int, names: Iterable[str]) -> list[str]:
        """Return the given names of extra states that belong to a chunk's modules."""
        first = self._first_expert(rank)
        count = (self._arguments.num_experts or 0) // self._layout.expert
        chunk_names = []
        for name in names:
            expert = parse(name).expert
            here = self.local.chunk_of(name) == (rank.pipeline, stage)
            if here and (expert is None or first <= expert < first + count):
                chunk_names.append(name)
        return chunk_names

    def local_name(self, name: str, rank: LegacyRank, stage: int, tied_copy: bool = False) -> str:
        """Return the key of a model-space name in a chunk's `state_dict`."""
        return self._names.local(name, self._layers(rank, stage).start, self._first_expert(rank), tied_copy)

    def is_last(self, rank: LegacyRank, stage: int) -> bool:
        """Return whether this chunk is the last of the model."""
        return (rank.pipeline, stage) == self._layout.last_chunk

    def part(self, name: str, rank: LegacyRank, kind: str = WEIGHT) -> DeclaredTensor:
        """Return a rank's part of a weight, or of its optimizer state of another kind."""
        name = self._twice.get(name, name)
        if name in self.local.weights:
            tensor = self.local.weights[name].tensor
            regions = self.local.part_of(name, rank.tensor)
        else:
            tensor = self._padded_tensor(name)
            regions = (Region.whole(name, tensor.shape),)
        shape = list(tensor.shape)
        for axis, size in enumerate(regions[0].sizes):
            # The two bands of a gated projection are concatenated.
            shape[axis] = sum(region.sizes[axis] for region in regions) if axis == 0 else size
        dtype = tensor.dtype if kind == WEIGHT else "float32"
        content = (WriteItem(0, self._target_slice(kind, regions, replace(tensor, dtype=dtype))),)
        return DeclaredTensor(getattr(torch, dtype), tuple(shape), content)

    def state_in_buffer(self, kind: str, name: str, regions: Sequence[Region]) -> TargetSlice:
        """Return the optimizer state of a parameter in a gradient buffer, where its regions are contiguous."""
        return self._target_slice(kind, regions, replace(self.local.weights[name].tensor, dtype="float32"))

    def _target_slice(self, kind: str, regions: Sequence[Region], tensor: LogicalTensor) -> TargetSlice:
        """Return a slice of regions of `tensor`, and of its other parts if the parameter has parts."""
        weights = self.local.weights
        others = {region.name for region in regions} - {tensor.name}
        tensors: Mapping[str, LogicalTensor] = {
            tensor.name: tensor,
            **{name: replace(weights[name].tensor, dtype=tensor.dtype) for name in others},
        }
        return TargetSlice(kind, Slice.whole(tuple(regions)), tensors, may_pad=is_in_vocabulary(tensor.name))

    def _padded_tensor(self, name: str) -> LogicalTensor:
        """Return a weight with the vocabulary padded for the target's tensor parallel size."""
        tensor = named_tensor(self._checkpoint, WEIGHT, name)
        if is_in_vocabulary(name):
            return replace(tensor, shape=(self._arguments.whole("padded_vocab_size"), *tensor.shape[1:]))
        return tensor

    def _holds(self, rank: LegacyRank, name: str) -> bool:
        owners = {owner.expert for owner in self.local.ranks_of(name)}
        return owners <= {None, rank.expert}

    def _layers(self, rank: LegacyRank, stage: int) -> range:
        """Return the global numbers of a chunk's decoder layers."""
        layers = self.local.layers_by_chunk
        return layers[rank.pipeline][stage] if layers else range(0)

    def _first_expert(self, rank: LegacyRank) -> int:
        return rank.expert * ((self._arguments.num_experts or 0) // self._layout.expert)
