"""Explains ranks that wrote no file."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.rank_grid import RankGrid


def why_silent(ranks: Sequence[int], grid: RankGrid, arguments: JobArguments) -> str:
    """Explain why some ranks wrote no file.

    Source: `FullyParallelSaveStrategyWrapper` (megatron/core/dist_checkpointing/strategies/fully_parallel.py): without
    it only main replicas are saved, all on data-parallel rank 0; with it they are distributed over all ranks.
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
