"""The sizes of a job on which its computation may depend, by their names."""

from __future__ import annotations

from mcore_ckpt_ext.continuity.batch_sizes import averaged_samples
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout

MICRO_BATCH = "micro batch size"
MICRO_BATCHES = "number of micro batches"
GLOBAL_BATCH = "global batch size"
RANK_TOKENS = "tokens of a rank"
TENSOR = "tensor parallel size"
CONTEXT = "context parallel size"
DATA = "data parallel size"
PIPELINE = "pipeline size"
VOCABULARY = "rows of the vocabulary"
EXPERT_TENSOR = "expert tensor parallel size without expert parallelism"


def sizes_of_job(job: JobArguments, consumed: int = 0) -> dict[str, float | None]:
    """Return the sizes from a position on, on which a job's computation may depend; None if unknown."""
    layout = ParallelLayout.from_arguments(job)
    return sizes_of(
        layout,
        job.micro_batch_size,
        averaged_samples(job, consumed),
        job.padded_vocab_size,
        divides_sequence=bool(job.raw.get("sequence_parallel")),
    )


def sizes_of(
    layout: ParallelLayout,
    micro_batch: int | None,
    global_batch: float | None,
    rows: int | None,
    *,
    divides_sequence: bool,
) -> dict[str, float | None]:
    """Return the sizes on which the computation of a job may depend; None for unknown ones.

    Args:
        layout: its parallel layout.
        micro_batch: samples of a micro batch.
        global_batch: samples of an iteration, or their mean.
        rows: rows of the vocabulary, padding included.
        divides_sequence: whether tensor-parallel ranks divide the sequence.
    """
    sizes = layout.known_sizes()
    data = sizes["data"]
    tensor = sizes["tensor"]
    context = sizes["context"]
    unknown = layout.unknown & {"tensor", "expert", "expert_tensor"}
    shards = None if tensor is None or context is None else context * (tensor if divides_sequence else 1)
    return {
        MICRO_BATCH: micro_batch,
        GLOBAL_BATCH: global_batch,
        MICRO_BATCHES: global_batch / (micro_batch * data) if micro_batch and global_batch and data else None,
        RANK_TOKENS: micro_batch / shards if micro_batch and shards else None,
        TENSOR: tensor,
        CONTEXT: context,
        DATA: data,
        PIPELINE: sizes["pipeline"],
        VOCABULARY: rows,
        EXPERT_TENSOR: None if unknown else layout.tensor / layout.expert_tensor if layout.divides_experts_alone else 1,
    }
