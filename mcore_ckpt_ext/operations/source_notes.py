"""Notes for a user of a conversion's destination, about its source."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt_ext.communicator import Communicator, run_on_all, total
from mcore_ckpt_ext.continuity.energon import saves_loader_states
from mcore_ckpt_ext.errors import shorten
from mcore_ckpt_ext.formats.view import CheckpointView, carried_kinds
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.replicas import differing_copies, differing_copies_note
from mcore_ckpt_ext.optimizers.tied_copies import differing_masters, differing_masters_note
from mcore_ckpt_ext.storage.file_digests import compare_digests


def source_notes(checkpoint: CheckpointView, folders: Iterable[Path], *, with_optimizer: bool) -> list[str]:
    """Return what a user of the destination should know of its source and of the folders that are read.

    `with_optimizer` is true if the destination can hold an optimizer.
    """
    return [
        *_left_by_offload(checkpoint),
        *(_left_to_loader(checkpoint.job.arguments()) if with_optimizer else []),
        *(note for folder in folders for note in _edit_notes(folder)),
    ]


def copies_notes(checkpoint: CheckpointView, with_optimizer: bool, team: Communicator) -> list[str]:
    """Return a note if ranks hold different copies of one tensor; each process compares its share."""
    kinds = carried_kinds(checkpoint) if with_optimizer else (WEIGHT,)
    copies = run_on_all(team, lambda: differing_copies(checkpoint, kinds, (team.rank, team.size)))
    count = total(team, len(copies))
    return [differing_copies_note(copies, count)] if count else []


def _left_by_offload(checkpoint: CheckpointView) -> list[str]:
    """Return a note if copies of the word embeddings differ in the way that CPU offload permits."""
    if not checkpoint.optimizer.format() or not checkpoint.job.arguments().optimizer_cpu_offload:
        return []
    count = differing_masters(checkpoint.optimizer.state(), checkpoint.files.transfer)
    return [differing_masters_note(count)] if count else []


def _left_to_loader(job: JobArguments) -> list[str]:
    """Return a note if the job has saved states of a data loader, which are no part of its checkpoint."""
    if not saves_loader_states(job):
        return []
    place = shorten(str(job.dataloader_save))
    return [
        f"the states of the data loader stay in {place}: to go on reading there, resume with --dataloader-save {place}"
    ]


def _edit_notes(folder: Path) -> list[str]:
    """Return a note for each small file of a source edited or damaged since this package wrote it."""
    comparison = compare_digests(folder)
    changed = comparison.changed if comparison else ()
    return [f"{folder / file.name} has changed since it was written: {file.what}" for file in changed]
