"""Which decoder layers lie on which ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.parallel import layers_by_chunk
from mcore_ckpt_ext.layout.rank_grid import RankGrid


@dataclass(frozen=True, slots=True)
class Stage:
    """A model chunk: the layers of one virtual stage of one pipeline rank.

    Attributes:
        pipeline: the pipeline rank.
        chunk: which of that rank's chunks (`--virtual-pipeline-model-parallel-size`).
        first: its first decoder layer.
        last: one past its last; equal to `first` where it has none.
        ranks: the global ranks that hold it or a tensor-parallel part of it, as runs (first, one past the last).
    """

    pipeline: int
    chunk: int
    first: int
    last: int
    ranks: tuple[tuple[int, int], ...]


def stages_of(checkpoint: CheckpointView, grid: RankGrid) -> tuple[Stage, ...]:
    """Every chunk of the job that wrote a checkpoint; empty where the pipeline's split is not known."""
    try:
        layers = checkpoint.layers() or layers_by_chunk(checkpoint.arguments, checkpoint.layout)
    except CheckpointError:  # arguments that contradict each other; what else is in the checkpoint can be shown
        return ()
    if layers is None or not grid.is_known or "virtual_pipeline" in grid.layout.unknown:
        return ()
    ranks = [_ranks(grid, pipeline) for pipeline in range(len(layers))]
    return tuple(
        Stage(pipeline, chunk, span.start, span.stop, ranks[pipeline])
        for pipeline, spans in enumerate(layers)
        for chunk, span in enumerate(spans)
    )


def _ranks(grid: RankGrid, pipeline: int) -> tuple[tuple[int, int], ...]:
    """The global ranks of a pipeline rank, as runs."""
    layout = grid.layout
    inner = layout.tensor * layout.context
    if not grid.pipeline_first:
        whole = inner * layout.data
        return ((pipeline * whole, (pipeline + 1) * whole),)
    starts = [(data * layout.pipeline + pipeline) * inner for data in range(layout.data)]
    return tuple((start, start + inner) for start in starts)
