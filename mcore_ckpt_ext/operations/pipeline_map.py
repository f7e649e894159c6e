"""Maps decoder layers to the ranks that hold them."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt_ext.errors import ContentError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.parallel import layers_by_chunk
from mcore_ckpt_ext.layout.rank_grid import RankGrid


@dataclass(frozen=True, slots=True)
class Stage:
    """A model chunk: the layers of one virtual stage of one pipeline rank.

    Attributes:
        pipeline: the pipeline rank.
        chunk: the number of the chunk on that rank (`--virtual-pipeline-model-parallel-size`).
        first: its first decoder layer.
        last: the end of its decoder layers (exclusive); equal to `first` if it has none.
        ranks: the global ranks that hold it or a tensor-parallel part of it, as ranges (first, end).
    """

    pipeline: int
    chunk: int
    first: int
    last: int
    ranks: tuple[tuple[int, int], ...]


def stages_of(checkpoint: CheckpointView, grid: RankGrid) -> tuple[Stage, ...]:
    """Return every chunk of the job that wrote a checkpoint; empty if the pipeline split is unknown."""
    try:
        layers = checkpoint.job.layers() or layers_by_chunk(checkpoint.job.arguments(), checkpoint.job.layout)
    except ContentError:  # contradictory arguments; the rest of the checkpoint can still be shown
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
    """Return the global ranks of a pipeline rank, as ranges."""
    layout = grid.layout
    inner = layout.tensor * layout.context
    if not grid.pipeline_first:
        whole = inner * layout.data
        return ((pipeline * whole, (pipeline + 1) * whole),)
    starts = [(data * layout.pipeline + pipeline) * inner for data in range(layout.data)]
    return tuple((start, start + inner) for start in starts)
