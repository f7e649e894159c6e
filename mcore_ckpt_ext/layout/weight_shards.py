"""A rank's part of a weight under generalized tensor parallelism, which divides weights further.

`--tensor-parallel-num-weight-shards` divides the rows of each matrix on a tensor-parallel rank into shards, if it is
the weight of a linear layer or of word embeddings. Norms, biases, and position embeddings are in every shard.
Sources: `wrap_module_params_gtp` and `_gtp_slice_one_param`
(megatron/core/tensor_parallel/generalized_tensor_parallelism.py) and `make_tp_sharded_tensor_for_checkpoint`
(megatron/core/utils.py), core_v0.19.2 and the head of August 2026.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError, format_value, quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import is_gated
from mcore_ckpt_ext.model_space.names import is_first_linear
from mcore_ckpt_ext.model_space.slices import Region

WEIGHT_SHARDS = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
"""The arguments for the number of shards of a tensor-parallel rank's weights, of dense layers and of experts."""
_MOST_SHARDS = 1 << 14
Grid = tuple[tuple[int, ...], ...]
"""The offsets of the stored chunks of a weight, on each axis."""


def weight_shards(arguments: JobArguments) -> int:
    """Return the number of shards of a tensor-parallel rank's dense weight; 1 if it is not divided.

    Raises:
        UnreadableCheckpointError: the argument is not a valid number.
    """
    return _weight_shards(arguments, WEIGHT_SHARDS[0])


def expert_weight_shards(arguments: JobArguments) -> int:
    """Return the number of shards of an expert's weight; errors are those of `weight_shards`."""
    return _weight_shards(arguments, WEIGHT_SHARDS[1])


def _weight_shards(arguments: JobArguments, name: str) -> int:
    value = arguments.raw.get(name)
    number = 1 if value is None else value
    if type(number) is not int or not 0 < number <= _MOST_SHARDS:
        raise UnreadableCheckpointError(
            "the arguments of the job name an impossible number of weight shards",
            found=f"{name} {format_value(value)}",
        )
    return number


def misplaces_gates(arguments: JobArguments) -> bool:
    """Return whether a job stores the rows of its gated linears at positions that depend on its shards.

    A shard of a gated first linear is a range of rows of the gate, or of the up projection.
    `apply_swiglu_sharded_factory` (megatron/core/transformer/mlp.py, core_v0.19.2 and the head of August 2026) ignores
    shards: it stores the first half of every shard as rows of the gate, and the second half as rows of the up
    projection. A job with the same shards loads correctly; any other job confuses rows of the two.
    """
    return is_gated(arguments) and weight_shards(arguments) > 1


def check_gates(written: JobArguments, running: JobArguments, where: str) -> None:
    """Refuse a resume that would confuse rows of a gate and of the up projection.

    Raises:
        UnsupportedCheckpointError: Megatron itself loads the weights of this model wrongly.
    """
    sizes = [(job.tensor_model_parallel_size or 1, weight_shards(job)) for job in (written, running)]
    if sizes[0] == sizes[1] or not (misplaces_gates(written) or misplaces_gates(running)):
        return
    actual, expected = (
        f"TP{tensor} and {quantity(tensor * shards, 'weight shard')}" for tensor, shards in reversed(sizes)
    )
    raise UnsupportedCheckpointError(
        "Megatron itself mixes up the rows of gated linears when the shards of generalized tensor parallelism change",
        found=actual,
        expected=expected,
        where=where,
        hint="resume under the --tensor-model-parallel-size and --tensor-parallel-num-weight-shards that it was "
        "written with",
    )


def check_no_sharded_gates(arguments: JobArguments, where: str) -> None:
    """Refuse to convert a model whose gates are stored by shard.

    Other jobs would misread the result.

    Raises:
        UnsupportedCheckpointError: the model's gates are stored by shard.
    """
    if misplaces_gates(arguments):
        raise UnsupportedCheckpointError(
            "only a job with the same weight shards reads the rows of these gated linears correctly",
            found=f"gated linears, and {quantity(weight_shards(arguments), 'weight shard')} of generalized tensor "
            "parallelism",
            where=where,
            hint="resume under the --tensor-model-parallel-size and --tensor-parallel-num-weight-shards that it was "
            "written with",
        )


@dataclass(frozen=True, slots=True)
class ShardOfWeight:
    """Shard number `shard` of `shards` of the weight on tensor-parallel rank `tensor` of `ranks`."""

    tensor: int
    ranks: int
    shard: int
    shards: int

    def regions(self, name: str, shape: tuple[int, ...], grid: Grid) -> tuple[Region, ...] | None:
        """Return its regions of a weight, in the order of the rank's memory.

        If tensor parallelism divides the rows of a matrix, the shards of one rank follow those of the rank before.
        Otherwise tensor parallelism divides the columns, and the shards the rows.

        Returns:
            None for another pattern of chunks.
        """
        if len(shape) != 2 or len(grid[1]) not in (1, self.ranks):
            return None
        rows, columns = grid
        if len(columns) > 1:
            return self._crossed_regions(name, shape, grid) if len(rows) == self.shards else None
        if is_first_linear(name) and len(rows) == 2 * self.ranks * self.shards:
            chosen = self._gated_shards()
        elif len(rows) == self.ranks * self.shards:
            chosen = [self.tensor * self.shards + self.shard]
        elif len(rows) == self.shards:
            chosen = [self.shard]
        else:
            return None
        ends = (*rows[1:], shape[0])
        return tuple(Region.band(name, shape, 0, rows[index], ends[index]) for index in chosen)

    def _crossed_regions(self, name: str, shape: tuple[int, ...], grid: Grid) -> tuple[Region, ...]:
        rows, columns = grid
        ends = (*rows[1:], shape[0])
        sides = (*columns[1:], shape[1])
        first = rows[self.shard]
        left = columns[self.tensor]
        return (Region(name, (first, left), (ends[self.shard] - first, sides[self.tensor] - left)),)

    def _gated_shards(self) -> list[int]:
        """Return the chunks of a shard of a gated first linear.

        They are halves of its rows, stored as gate and up projection. See `misplaces_gates`.
        """
        first = self.tensor * self.shards + self.shard
        return [first, self.ranks * self.shards + first]
