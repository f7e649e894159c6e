"""One answer for `convert`, `verify` and rehearsals: does Megatron accept a layout for a model?"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.found_layout import SearchRequest
from mcore_ckpt_ext.layout_choice.search import Search, search
from mcore_ckpt_ext.model_space.anatomy import pipelined_block
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.job_buffers import buffers_of
from mcore_ckpt_ext.operations.known_arguments import with_derived_arguments
from mcore_ckpt_ext.operations.parameter_table import table_of
from mcore_ckpt_ext.versions import NEWEST, Version


def search_sizes(
    checkpoint: CheckpointView,
    written: JobArguments,
    model: JobArguments,
    gpus: int,
    sizes: Mapping[str, int],
    version: Version,
) -> Search:
    """Return the layouts with given sizes that Megatron accepts for a checkpoint's model.

    Args:
        checkpoint: the checkpoint.
        written: the arguments of the job that wrote it.
        model: the arguments of the model in the job that will run.
        gpus: the number of its ranks.
        sizes: fixed sizes, by their names in `ParallelLayout`.
        version: the release of Megatron that will run.

    Raises:
        UnsupportedCheckpointError: the checkpoint does not describe its model completely.
    """
    table = table_of(checkpoint, written)
    request = SearchRequest(gpus, gpus, version, pins=sizes)
    return search(model, table, ParallelLayout.from_arguments(written), request, buffers_of(written, table, version))


def refusal_of_files(checkpoint: CheckpointView, job: JobArguments, version: Version) -> str | None:
    """Return why no job can read the files that each rank of a layout has; None if one can.

    The files fix all sizes but those of data and context parallelism. The rules are those of a model with one stack of
    layers: of T5, which has an encoder and a decoder, nothing is known, and nothing refused.

    Args:
        checkpoint: a checkpoint of the model.
        job: the arguments of the job that reads them.
        version: its release of Megatron.

    Raises:
        UnsupportedCheckpointError: the checkpoint does not describe its model completely.
    """
    if pipelined_block(checkpoint.names(WEIGHT)) is None:
        return None
    layout = ParallelLayout.from_arguments(job)
    sizes = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "virtual_pipeline": job.virtual_pipeline_model_parallel_size or 1,
        "expert": layout.expert,
        "expert_tensor": layout.expert_tensor,
    }
    model_ranks = lcm(layout.tensor * layout.context, layout.expert_tensor * layout.expert)
    model = with_derived_arguments(checkpoint, checkpoint.job.arguments())
    if model.num_distributed_optimizer_instances:
        model = model.replace(num_distributed_optimizer_instances=1)  # they divide the data-parallel ranks
    pattern = model.hybrid_layer_pattern or ""
    stages = layout.pipeline * sizes["virtual_pipeline"]
    if pattern and pattern.count("|") + 1 != stages:
        # The files are those of a job that divides the same layers otherwise.
        model = model.replace(hybrid_layer_pattern=pattern.replace("|", ""))
    refusal = search_sizes(checkpoint, model, model, layout.pipeline * model_ranks, sizes, version).refusal
    return None if refusal is None else refusal.reason


def refusal_of_stored_files(checkpoint: CheckpointView) -> str | None:
    """Return why no release of Megatron can read a checkpoint with a file for each rank; else None.

    The newest release accepts every layout that an earlier one accepts.

    Returns:
        None if one can, if files do not belong to ranks, or if the model is not described completely.
    """
    if not (checkpoint.format.loading.by_rank and checkpoint.job.arguments().is_complete):
        return None
    try:
        return refusal_of_files(checkpoint, checkpoint.job.arguments(), NEWEST)
    except UnsupportedCheckpointError:
        return None


def check_files(checkpoint: CheckpointView, job: JobArguments, version: Version) -> None:
    """Refuse to write files of ranks for a layout that Megatron refuses; see `refusal_of_files`.

    Raises:
        UnsupportedCheckpointError: Megatron refuses the layout.
    """
    if reason := refusal_of_files(checkpoint, job, version):
        raise refused_layout(checkpoint, reason)


def refused_layout(checkpoint: CheckpointView, reason: str) -> UnsupportedCheckpointError:
    """Return the error about a layout that Megatron refuses."""
    return UnsupportedCheckpointError(
        "Megatron refuses this layout for the model",
        found=reason,
        where=str(checkpoint.files.folder),
        hint="list those that it accepts: mcore-ckpt plan SRC --gpus 8; a job reads --to torch_dist under each",
    )
