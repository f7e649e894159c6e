"""The elements of each parameter on a data-parallel rank, in the order of its gradient buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.legacy.target_parameter_order import order_for
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.releases import CLOSES_BUCKETS_AT_ALIGNED_ENDS
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import ModelRank
from mcore_ckpt_ext.layout.packing_proposals import PackedBuffer, buffer_ranks, pack_buffers
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.layout.rank_grid import RankGrid
from mcore_ckpt_ext.rehearsal.ranks import SimulatedJob, SimulatedShard
from mcore_ckpt_ext.versions import Version


class DataParallelRanks:
    """The individual data-parallel ranks of a simulated job, needed to report which ranks refuse."""

    def __init__(self, job: SimulatedJob, checkpoint: CheckpointView, version: Version) -> None:
        self._job = job
        self._checkpoint = checkpoint
        self._version = version
        self._buffers: dict[ModelRank, list[PackedBuffer] | None] = {}

    @cached_property
    def are_known(self) -> bool:
        """True if the division of the job's buffers is known.

        Otherwise every rank is assumed to have whole parts.
        """
        is_known = CLOSES_BUCKETS_AT_ALIGNED_ENDS.is_of(self._version) and self._order is not None
        return is_known and bool(self._job.arguments.use_distributed_optimizer)

    def places(self, rank: int) -> list[tuple[ModelRank, int]]:
        """Return a rank's places in the model, dense parameters first, each with its number in their group."""
        layout = self._job.layout
        grid = RankGrid(layout, bool(self._job.arguments.use_tp_pp_dp_mapping))
        tensor, context, data, pipeline = grid.coordinates(rank)
        places = [(ModelRank(pipeline, tensor), data * layout.context + context)]
        if self._job.models.has_expert_optimizer:
            within = (data * layout.context + context) * layout.tensor + tensor
            rest, part = divmod(within, layout.expert_tensor)
            number, expert = divmod(rest, layout.expert)
            places.append((ModelRank(pipeline, part, expert), number))
        return places

    def shards(self, rank: int, parts: Mapping[ModelRank, Sequence[SimulatedShard]]) -> list[SimulatedShard]:
        """Return a rank's shards of the given parts, in the order of its optimizers.

        Args:
            rank: its global number.
            parts: whole parts of parameters by place in the model.
        """
        shards: list[SimulatedShard] = []
        for place, number in self.places(rank):
            local_parts = parts.get(place, ())
            shards += self._cut(place, number, local_parts) if local_parts and self.are_known else local_parts
        return shards

    def _cut(self, place: ModelRank, number: int, parts: Sequence[SimulatedShard]) -> Iterator[SimulatedShard]:
        by_name = {part.name: part for part in parts}
        ranks = buffer_ranks(self._job.models, place)
        for buffer in self._packed_buffers(place):
            for bucket in buffer.buckets:
                size = (bucket.stop - bucket.start) // ranks
                first = number % ranks * size
                for index, start, stop in bucket.placements:
                    low = max(start, first)
                    high = min(stop, first + size)
                    part = by_name.get(buffer.names[index])
                    if part is not None and low < high:
                        yield part.part(low - start, high - start)

    def _packed_buffers(self, place: ModelRank) -> list[PackedBuffer]:
        if place not in self._buffers:
            order = self._order
            models = self._job.trained_models
            stages = range(self._job.layout.virtual_pipeline)
            rule = PackingRule.SINCE_0_13
            self._buffers[place] = None if order is None else pack_buffers(models, order, rule, place, stages)
        return self._buffers[place] or []

    @cached_property
    def _order(self) -> ParameterOrder | None:
        try:
            order = order_for(
                self._checkpoint, self._job.arguments, self._job.models.has_expert_optimizer, self._version
            )
        except UnsupportedCheckpointError:
            return None
        return order
