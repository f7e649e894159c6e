"""Global ranks and their places in a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout


@dataclass(frozen=True)
class RankGrid:
    """The order of ranks: tensor ranks run fastest, then context, data, pipeline.

    With `--use-tp-pp-dp-mapping` (`pipeline_first`) pipeline ranks run before data ranks. Expert ranks divide the ranks
    of a pipeline stage in their own way. Source: `RankGenerator` and its orders, megatron/core/parallel_state.py
    and megatron/training/initialize.py, core_v0.7.0 to 0.19.2.
    """

    layout: ParallelLayout
    pipeline_first: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the sizes are known that say where a rank stands."""
        return self.layout.unknown.isdisjoint(("tensor", "pipeline", "context", "data", "world"))

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """(tensor, context, data, pipeline) of a global rank."""
        layout = self.layout
        rest, tensor = divmod(rank, layout.tensor)
        rest, context = divmod(rest, layout.context)
        if self.pipeline_first:
            data, pipeline = divmod(rest, layout.pipeline)
        else:
            pipeline, data = divmod(rest, layout.data)
        return tensor, context, data, pipeline

    def place(self, rank: int) -> str:
        """A global rank's place, in words."""
        if not self.is_known:
            return "not known"
        layout = self.layout
        tensor, context, data, pipeline = self.coordinates(rank)
        sizes = ((layout.tensor, "tensor", tensor), (layout.pipeline, "pipeline", pipeline))
        more = ((layout.context, "context", context), (layout.data, "data", data))
        return ", ".join(f"{name} {number}" for size, name, number in (*sizes, *more) if size > 1) or "the only rank"

    def model_place(self, tensor: int, pipeline: int, expert: int) -> str:
        """The place of a model-parallel rank, in words."""
        layout = self.layout
        dense = ((layout.tensor, "tensor", tensor), (layout.pipeline, "pipeline", pipeline))
        sizes = (*dense, (layout.expert, "expert", expert))
        return ", ".join(f"{name} {number}" for size, name, number in sizes if size > 1) or "the only one"


def why_silent(ranks: Sequence[int], grid: RankGrid, arguments: JobArguments) -> str:
    """Why these ranks wrote no file.

    Source: `FullyParallelSaveStrategyWrapper` (megatron/core/dist_checkpointing/strategies/fully_parallel.py): without
    it only main replicas are saved, which are those of data-parallel rank 0; with it they are spread over all.
    """
    if not ranks:
        return ""
    replicas = all(grid.coordinates(rank)[1] or grid.coordinates(rank)[2] for rank in ranks)
    if replicas and not arguments.ckpt_fully_parallel_save:
        return (
            "without --ckpt-fully-parallel-save only data-parallel rank 0 writes; the other ranks hold copies of the "
            "same, and had nothing of their own to write"
        )
    if replicas:
        return "these data-parallel ranks had nothing to write: their share of the tensors was empty"
    return "nothing in the checkpoint came from them: their files are not part of it"
