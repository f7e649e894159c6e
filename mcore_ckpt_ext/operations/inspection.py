"""Describes a checkpoint by its metadata: layout, writer, model, sizes, files, what can resume it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from mcore_ckpt_ext.continuity.data_order import data_description
from mcore_ckpt_ext.defaults import SCHEMAS
from mcore_ckpt_ext.errors import reraise_as_unreadable
from mcore_ckpt_ext.formats.accounts import account_of
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.unread_state import OTHER
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_contradiction
from mcore_ckpt_ext.job.dimensions import LABELS
from mcore_ckpt_ext.job.facts import NOTHING, Facts
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.rank_grid import RankGrid
from mcore_ckpt_ext.model_space.slices import numel_of
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.inspection_result import BufferMap, Inspection, StoredFile, StoredTensor
from mcore_ckpt_ext.operations.pipeline_map import stages_of
from mcore_ckpt_ext.operations.resumptions import has_job, resumptions, writer_of
from mcore_ckpt_ext.optimizers.description import describe_optimizers
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.optimizers.table import opens_by_metadata, shows_names
from mcore_ckpt_ext.storage.gc_pause import collector_paused
from mcore_ckpt_ext.storage.paths import file_sizes

SCHEMA = SCHEMAS["inspect"]
_DISTCP = re.compile(r"^(?:.*/)?__(\d+)_(\d+)\.distcp$")


def inspect(
    path: str | os.PathLike[str],
    *,
    buffers: bool = False,
    facts: Facts = NOTHING,
    weights: str | os.PathLike[str] | None = None,
) -> Inspection:
    """Inspect a checkpoint; only metadata is read.

    Args:
        path: a run folder (its newest iteration), an iteration folder, or a canonical folder.
        buffers: also propose the packing of flat gradient buffers.
        facts: facts about the job that wrote a checkpoint without Megatron's arguments.
        weights: the path of the weights, if the checkpoint holds only an optimizer; samples of them are then read.

    Raises:
        CheckpointError: the checkpoint cannot be read.

    Example:
        >>> found = inspect("run")
        >>> found.writer.version, found.layout_text, found.model["parameters"]
        ('0.16', 'TP2 x PP2 x DP2', 53536)
        >>> [(who.who, who.versions) for who in found.resumptions][-1]
        ('Megatron with mcore_ckpt_ext', '0.16 to 0.19')
    """
    with collector_paused(), reraise_as_unreadable(path):
        return _inspection(open_checkpoint(path, facts=facts, weights=weights), buffers)


def _inspection(checkpoint: CheckpointView, buffers: bool) -> Inspection:
    job = checkpoint.job
    optimizer = checkpoint.optimizer
    arguments = job.arguments()
    layout = job.layout
    sidecar = job.found_sidecar()
    writer = writer_of(checkpoint)
    grid = RankGrid(layout, bool(arguments.use_tp_pp_dp_mapping))
    with_job = has_job(checkpoint, writer)
    on_disk = file_sizes(checkpoint.files.folder, skip_forbidden=True)
    files = _files(checkpoint, None if writer.converted else grid, on_disk)
    ranks = {file.rank for file in files if file.rank is not None}
    silent = tuple(rank for rank in range(layout.world) if rank not in ranks) if ranks and grid.is_known else ()
    by_kind: dict[str, int] = {}
    for file in files:
        for kind, size in file.bytes_by_kind.items():
            by_kind[kind] = by_kind.get(kind, 0) + size
    sizes = layout.known_sizes() if with_job else dict.fromkeys(layout.sizes())
    return Inspection(
        schema=SCHEMA,
        path=str(checkpoint.files.folder),
        format=checkpoint.format.name,
        iteration=None if job.is_release else job.iteration(),
        layout={LABELS.get(name, name): size for name, size in sizes.items()},
        layout_text=str(layout) if with_job else "",
        writer=writer,
        optimizer_format=optimizer.format(),
        optimizer=describe_optimizers(
            [kind for kind, size in by_kind.items() if size and kind not in (WEIGHT, OTHER)],
            optimizer.param_groups(),
            arguments,
        ),
        model=_model(checkpoint),
        training={} if job.is_release else _training(checkpoint),
        bytes_on_disk=sum({**on_disk, **{file.file: file.bytes_on_disk or 0 for file in files}}.values()),
        bytes_by_kind=by_kind,
        files=tuple(files),
        silent_ranks=silent,
        why_silent=_why_silent(silent, grid, arguments),
        resumptions=tuple(resumptions(checkpoint, writer)),
        sidecar=sidecar.sidecar is not None,
        sidecar_problem=sidecar.problem,
        tensors=_tensors(checkpoint),
        buffers=_buffers(checkpoint) if buffers else (),
        stages=stages_of(checkpoint, grid) if with_job else (),
        account=account_of(checkpoint, elements=False),
        described_by=checkpoint.job.described_by(),
        unbelieved=tuple(checkpoint.job.problems()),
        data={} if checkpoint.job.is_release else data_description(checkpoint.job.arguments()),
    )


def _why_silent(ranks: Sequence[int], grid: RankGrid, arguments: JobArguments) -> str:
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


def _files(checkpoint: CheckpointView, grid: RankGrid | None, on_disk: Mapping[str, int]) -> list[StoredFile]:
    files: dict[str, StoredFile] = {}
    for parts in checkpoint.files.stored_parts():
        for name, nbytes in parts.places:
            file = files.get(name)
            if file is None:
                file = files[name] = _explain(checkpoint, name, grid, on_disk.get(name))
            file.records += 1
            file.bytes_by_kind[parts.kind] = file.bytes_by_kind.get(parts.kind, 0) + nbytes
            if not file.tensors or file.tensors[-1] != parts.tensor:
                file.tensors.append(parts.tensor)
    for file in files.values():
        file.tensors = list(dict.fromkeys(file.tensors))
    return sorted(files.values(), key=lambda file: (file.rank is None, file.rank or 0, file.writer or 0, file.file))


def _explain(checkpoint: CheckpointView, name: str, grid: RankGrid | None, size: int | None) -> StoredFile:
    """Return a file with its place in the layout; `grid`: places of the ranks that wrote files, if known."""
    if size is None:  # missing, or not below the folder
        with suppress(OSError):
            size = (checkpoint.files.folder / name).stat().st_size
    # An absolute path is a file of another job.
    if grid is not None and (match := _DISTCP.match(name)) and not name.startswith("/"):
        rank = int(match[1])
        return StoredFile(name, rank, int(match[2]), grid.place(rank), size)
    if (rank_of_file := checkpoint.files.rank_of(name)) is not None:
        place = RankGrid(checkpoint.job.layout).model_place(*rank_of_file)
        return StoredFile(name, None, None, place, size)
    return StoredFile(name, None, None, "", size)


def _model(checkpoint: CheckpointView) -> dict[str, int | float | str]:
    """Return the model in numbers, without unknown arguments.

    The arguments of a job are left out, too, if no job saved the checkpoint.
    """
    names = {
        "layers": "num_layers",
        "hidden size": "hidden_size",
        "feed-forward size": "ffn_hidden_size",
        "attention heads": "num_attention_heads",
        "query groups": "num_query_groups",
        "experts": "num_experts",
        "experts per token": "moe_router_topk",
        "sequence length": "seq_length",
        "vocabulary, padded": "padded_vocab_size",
        "layer spec": "transformer_impl",
    }
    if not checkpoint.format.is_of_job:
        del names["sequence length"], names["vocabulary, padded"], names["layer spec"]
        names |= {"positions": "max_position_embeddings", "vocabulary": "vocab_size"}
    arguments = checkpoint.job.arguments()
    tensors = [checkpoint.logical_tensor(WEIGHT, name) for name in checkpoint.names(WEIGHT)]
    shapes = [(tensor.shape, tensor.dtype) for tensor in tensors if tensor is not None]
    experts = {"experts", "experts per token"} if not arguments.num_experts else set()
    facts: dict[str, Any] = {"parameters": sum(prod(shape) for shape, _ in shapes)}
    for label, name in names.items():
        if arguments.value(name) is not None and label not in experts:
            facts[label] = arguments.value(name)
    if "vocabulary, padded" in names and (contradiction := vocabulary_contradiction(checkpoint)):
        facts["vocabulary, padded"] = contradiction
    if not arguments.group_query_attention:
        facts.pop("query groups", None)
    if arguments.is_complete or arguments.is_set("untie_embeddings_and_output_weights"):
        facts["embeddings"] = "untied" if arguments.untie_embeddings_and_output_weights else "tied"
    facts["weights"] = ", ".join(sorted({dtype for _, dtype in shapes}))
    return {key: value if isinstance(value, (int, float, str)) else str(value) for key, value in facts.items()}


def _training(checkpoint: CheckpointView) -> dict[str, int | float | list[int | float]]:
    """Return learning rate, step and counters, from the parameter groups and arguments."""
    groups = checkpoint.optimizer.param_groups()
    facts: dict[str, int | float | list[int | float]] = {}
    for key in ("step", "lr"):
        values = sorted({float(group[key]) for group in groups if isinstance(group.get(key), (int, float))})
        if values:
            whole = [int(value) if value.is_integer() else value for value in values]
            facts[key] = whole[0] if len(whole) == 1 else whole
    for key in ("consumed_train_samples", "consumed_valid_samples"):
        if (value := checkpoint.job.arguments().value(key)) is not None:
            facts[key] = value
    return facts


def _tensors(checkpoint: CheckpointView) -> tuple[StoredTensor, ...]:
    """Return all weights, and optimizer state if the format names it without a packing."""
    kinds = checkpoint.kinds() if shows_names(checkpoint.optimizer.format()) else [WEIGHT]
    tensors = [(kind, checkpoint.logical_tensor(kind, name)) for kind in kinds for name in checkpoint.names(kind)]
    return tuple(StoredTensor(kind, t.name, t.shape, t.dtype) for kind, t in tensors if t is not None)


def _buffers(checkpoint: CheckpointView) -> tuple[BufferMap, ...]:
    name = checkpoint.optimizer.format()
    if name is None or not opens_by_metadata(name):
        return ()
    return tuple(mapped for buffers in checkpoint.optimizer.state().buffers for mapped in _maps(buffers))


def _maps(buffers: Buffers) -> Iterator[BufferMap]:
    for key, proposal in buffers.proposed_packings().items():
        group = buffers.groups[key]
        for bucket, stored in sorted(group.buckets.items()):
            placements = proposal.packing[bucket] if proposal else ()
            parameters = tuple((p.name, p.start, p.start + numel_of(p.regions)) for p in placements)
            order_source = proposal.order_source if proposal else ""
            yield BufferMap(str(group), str(bucket), stored.numel_unpadded, order_source, parameters)
