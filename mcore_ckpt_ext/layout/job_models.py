"""The parameters of each rank of a job that will read a checkpoint, by Megatron's rules."""

from __future__ import annotations

from collections.abc import Mapping

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_model import LocalModels, StoredWeight
from mcore_ckpt_ext.layout.local_parameters import shard_grid, tower_gates
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.model_space.names import is_module_buffer, is_of_experts
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import LogicalTensor


class JobModels(LocalModels):
    """The local parameters of every rank of a job that would read tensors."""

    def __init__(
        self,
        tensors: Mapping[str, LogicalTensor],
        arguments: JobArguments,
        layout: ParallelLayout,
        version: tuple[int, int],
    ) -> None:
        """Divide the tensors among the ranks.

        Args:
            tensors: the whole tensors as the job has them, by model-space name.
            arguments: the job's arguments.
            layout: the job's layout.
            version: the version of Megatron that it runs.

        Raises:
            UnsupportedCheckpointError: a tensor or the layers cannot be divided, or how they are is unknown.
        """
        gates = tower_gates({name: tensor.shape for name, tensor in tensors.items()})
        weights = {}
        for name, tensor in tensors.items():
            if not is_module_buffer(name):
                ranks = layout.expert_tensor if is_of_experts(name) else layout.tensor
                grid = shard_grid(name, tensor.shape, ranks, arguments, version, gates.get(name))
                weights[name] = StoredWeight(tensor, grid)
        super().__init__(weights, arguments, layout, has_expert_optimizer=layout.separates_experts)
        if self.chunks is None:
            raise UnsupportedCheckpointError(
                "the layers of each pipeline rank of this layout are unknown",
                found=f"{quantity(arguments.num_layers or 0, 'layer')}, {layout}",
                hint="choose a pipeline size, and virtual stages, that divide the layers evenly",
            )

    def part_of(self, name: str, tensor_rank: int) -> tuple[Region, ...]:
        """Return one rank's part of a parameter.

        Args:
            name: its name.
            tensor_rank: the tensor-parallel rank; for experts too, whose tensor-parallel size may differ.

        Raises:
            UnsupportedCheckpointError: the split of the parameter is unknown.
        """
        regions = self.regions(name, tensor_rank % self._tensor_ranks(name))
        if regions is None:
            raise UnsupportedCheckpointError("the tensor-parallel split of a parameter is unknown", where=name)
        return regions
