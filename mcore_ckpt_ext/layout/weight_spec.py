"""Shape and sharding of a weight outside the checkpoint, on which its optimizer's packing depends."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt_ext.layout.local_model import StoredWeight
from mcore_ckpt_ext.model_space.names import is_of_experts
from mcore_ckpt_ext.model_space.tensors import LogicalTensor


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Shape and sharding of a weight of a live model or of another checkpoint.

    Attributes:
        tensor: name, global shape and dtype.
        axis: the axis that tensor parallelism shards; None if every rank has the whole weight.
        parts: number of row blocks on each rank: two for a fused gate and up projection.
    """

    tensor: LogicalTensor
    axis: int | None
    parts: int = 1

    def stored_weight(self, tensor_ranks: int, expert_ranks: int) -> StoredWeight:
        """Return the weight as it is stored by `tensor_ranks` or, for experts, `expert_ranks` ranks."""
        shape = self.tensor.shape
        grid: list[tuple[int, ...]] = [(0,)] * len(shape)
        if self.axis is not None:
            bands = self.parts * (expert_ranks if is_of_experts(self.tensor.name) else tensor_ranks)
            size = shape[self.axis] // bands
            grid[self.axis] = tuple(size * band for band in range(bands))
        return StoredWeight(self.tensor, tuple(grid))
