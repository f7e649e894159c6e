"""Converts a checkpoint into another format or layout: from a path to a published folder.

The target lays out its files, the source finds where each element lies, and the plan between the two is executed block
by block. Every master is compared with its weight on the way.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt_ext.communicator import Communicator, SingleProcess, run_on_all, total
from mcore_ckpt_ext.continuity.energon import saves_loader_states
from mcore_ckpt_ext.defaults import DEFAULT_MEMORY, DEFAULT_WORKERS
from mcore_ckpt_ext.errors import DestinationError, ProofError, counted, reraise_as_unreadable, shorten
from mcore_ckpt_ext.families.config_keys import accepting
from mcore_ckpt_ext.formats.accounts import Account
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.laid_out import OutputPlan
from mcore_ckpt_ext.formats.unread_state import UnreadState
from mcore_ckpt_ext.formats.view import CheckpointView, carried_kinds
from mcore_ckpt_ext.job.facts import NOTHING, Facts
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.weight_shards import check_no_sharded_gates
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.block_reader import BlockReader
from mcore_ckpt_ext.operations.coverage import raise_first_contradiction
from mcore_ckpt_ext.operations.destination import checked_destination
from mcore_ckpt_ext.operations.execution import LocalExecution, RemoteExecution
from mcore_ckpt_ext.operations.output_planning import lay_out
from mcore_ckpt_ext.operations.replicas import differing_copies, differing_copies_note
from mcore_ckpt_ext.operations.short_repr import ShortRepr
from mcore_ckpt_ext.operations.source_checks import source_findings
from mcore_ckpt_ext.operations.source_state import FolderState, check_unchanged, folder_state, state_before
from mcore_ckpt_ext.operations.sources import open_source
from mcore_ckpt_ext.operations.unsupported_state import resolve_dropped_state
from mcore_ckpt_ext.optimizers.digests import check_digests
from mcore_ckpt_ext.optimizers.tied_copies import differing_masters, differing_masters_note
from mcore_ckpt_ext.planning.write_plan import Output
from mcore_ckpt_ext.storage.file_digests import compare_digests, with_digests
from mcore_ckpt_ext.storage.paths import as_path, is_remote
from mcore_ckpt_ext.targets import Target, target_of
from mcore_ckpt_ext.writing import BLOCK_BYTES

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family

# A block is in memory as it is written, and once more while it is verified, together with its weights.
_BLOCKS_AT_ONCE = 4
# The block is still in the cache when it is verified, digested and written; a smaller one would cost more planning.
_CACHED_BYTES = 8 << 20
_LEAST_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, repr=False)
class Report(ShortRepr):
    """The result of a conversion, or of its dry run; sizes in bytes.

    Attributes:
        destination: the folder that was made.
        files: the number of its files.
        records: the number of arrays in them.
        bytes_read: the size of the tensors that were read.
        bytes_written: the size of all files.
        peak_memory: the maximum size of all blocks together.
        proven_elements: the number of masters that were verified against their weights.
        seconds: the duration.
        notes: messages for a user of the destination.
        lost: the number of elements that the source itself lacks, by parameter.
        account: what was done with each key of the source.
        how: how masters were verified, in words.
    """

    destination: Path
    files: int
    records: int
    bytes_read: int
    bytes_written: int
    peak_memory: int
    proven_elements: int
    seconds: float
    notes: Sequence[str]
    lost: Mapping[str, int] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    how: str = "round to their weights"

    @property
    def unread(self) -> Sequence[UnreadState]:
        """Keys of the source that are unknown or not converted."""
        return self.account.not_looked_at


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    target: Target | str,
    *,
    family: str | None = None,
    accept_keys: Sequence[str] = (),
    workers: int = DEFAULT_WORKERS,
    memory_limit: int = DEFAULT_MEMORY,
    force: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    accept_lost: bool = False,
    drop: str | Collection[str] = (),
    facts: Facts = NOTHING,
    weights: str | os.PathLike[str] | None = None,
    merge: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    team: Communicator | None = None,
) -> Report:
    """Convert a checkpoint, optimizer included.

    Args:
        source: a run folder (its newest iteration), an iteration folder, a Hugging Face or a canonical folder.
        destination: the run folder to make (for `HuggingFace` and `Canonical` the folder itself).
        target: the format to write: `TorchDist(...)`, `Legacy(...)`, `FsdpDtensor()`, `HuggingFace(...)` or
            `Canonical()`; or its name, such as `torch_dist`.
        family: the model family of a Hugging Face folder, if it is not recognized: a name, or `path.py:Class`, which is
            executed.
        accept_keys: keys of a Hugging Face folder's `config.json` that have no effect on what the model computes.
        workers: the number of records that are written at the same time.
        memory_limit: the maximum number of bytes of the blocks of all workers together.
        force: replace the destination.
        resume: continue an interrupted conversion of the same source with the same options.
        dry_run: only report what would be done.
        accept_lost: convert although the source lacks elements of the optimizer; their masters are taken from the
            weights, their moments become zero.
        drop: kinds of optimizer state to leave out because they cannot be converted; `optimizer` leaves all of it out.
        facts: facts about the job that wrote a source without Megatron's arguments.
        weights: the path of the weights, if the source holds only an optimizer: a Hugging Face folder, or a checkpoint.
        merge: the model into which the source's adapters are merged: a Hugging Face folder or a checkpoint, or the
            source itself if it contains the model.
        progress: called with the bytes written so far and the bytes to write, of this process.
        team: the processes that share the work, each with the same arguments; by default only this one.

    Raises:
        UsageError: an option is invalid for this source.
        TypeError: the target is no format to write.
        CheckpointError: the source cannot be read, verified or represented, or the destination cannot be written.
            Nothing is published then.

    Example:
        >>> report = convert("run", "out", TorchDist(megatron_version="0.16.1"))
        >>> report.proven_elements, report.files
        (53536, 6)
        >>> open_checkpoint("out").optimizer.format()
        'fully_reshardable'
    """
    begun = time.monotonic()
    target = target_of(target)
    drop = [drop] if isinstance(drop, str) else drop
    team = team or SingleProcess()
    model_family = _family_named(family) if family else None
    states = state_before(as_path(source))
    with accepting(accept_keys):
        checkpoint = open_source(source, target, model_family, facts, weights, merge)
    views = checkpoint.composition.merged_from or [checkpoint]
    folders = [*(view.files.folder for view in views), *([as_path(weights)] if weights is not None else [])]
    states = {folder: states[folder] if folder in states else folder_state(folder) for folder in folders}
    with reraise_as_unreadable(checkpoint.files.folder):
        for view in views:
            check_no_sharded_gates(view.job.arguments(), str(view.files.folder))
        checkpoint, account = resolve_dropped_state(checkpoint, target, drop)
        laid_out = lay_out(checkpoint, target, model_family)
    output = with_digests(laid_out.output, laid_out.folder)
    inputs = [*folders, as_path(source), *([as_path(merge)] if merge is not None else []), *map(as_path, target.reads)]
    place = checked_destination(destination, inputs, laid_out.folder)
    reads_optimizer = laid_out.reads_optimizer and checkpoint.optimizer.format() is not None
    with reraise_as_unreadable(checkpoint.files.folder):
        lost = _checked_losses(checkpoint, accept_lost) if reads_optimizer else {}
        findings = [*source_findings(checkpoint, with_optimizer=reads_optimizer, incomplete=bool(lost))]
        raise_first_contradiction(checkpoint, (finding for finding in findings if finding.severity == "error"))
        if reads_optimizer and not dry_run:
            _check_digests(checkpoint, team)
    notes = [
        *output.notes,
        *_left_by_offload(checkpoint),
        *(_left_to_loader(checkpoint.job.arguments()) if laid_out.reads_optimizer else []),
        *(f"{finding.where}: {finding.what}" for finding in findings),
        *(note for folder in states for note in _edited(folder)),
    ]
    block_bytes = _block_bytes(checkpoint, output, memory_limit // workers)
    reader = BlockReader(checkpoint, accept_lost)
    if not dry_run:
        with reraise_as_unreadable(checkpoint.files.folder):
            notes += _differing_copies(checkpoint, reads_optimizer, team)
        identity = (*_identity_of_sources(states), target, family, accept_lost, sorted(drop), facts)
        execute = RemoteExecution if is_remote(place.path) else LocalExecution
        execution = execute(place, _fingerprint(identity, output), team, workers, block_bytes)
        checks = (
            lambda: check_unchanged(states),
            lambda: _check_readable(execution.folder, checkpoint, laid_out),
        )
        notes += execution.write(output, reader, checks, progress, force=force, resume=resume)
    return Report(
        destination=place.path,
        files=len(output.files),
        records=len(output.records),
        bytes_read=sum(record.nbytes for record in output.records),
        bytes_written=output.bytes_written,
        peak_memory=workers * _BLOCKS_AT_ONCE * block_bytes,
        proven_elements=total(team, reader.proven),
        seconds=time.monotonic() - begun,
        notes=notes,
        lost=lost,
        account=account,
        how=checkpoint.job.master_check.relation
        if checkpoint.job.master_check.is_approximate
        else "round to their weights",
    )


def _block_bytes(checkpoint: CheckpointView, output: Output, memory_of_worker: int) -> int:
    """Return the largest size of a block, of which a worker has several at once."""
    largest = BLOCK_BYTES if _reorders_elements(checkpoint, output) else _CACHED_BYTES
    return max(_LEAST_BLOCK_BYTES, min(largest, memory_of_worker // _BLOCKS_AT_ONCE))


def _identity_of_sources(states: Mapping[Path, FolderState]) -> tuple[object, ...]:
    """Return what shows that two conversions have the same sources, on any machine.

    Inodes and devices differ between machines that share the work, and after a restart.
    """
    return [*map(str, states)], [[entry[:3] for entry in state] for state in states.values()]


def _left_to_loader(job: JobArguments) -> list[str]:
    """Return a note if the job has saved states of a data loader, which are no part of its checkpoint."""
    if not saves_loader_states(job):
        return []
    place = shorten(str(job.dataloader_save))
    return [
        f"the states of the data loader stay in {place}: to go on reading there, resume with --dataloader-save {place}"
    ]


def _edited(folder: Path) -> list[str]:
    """Return a note for each small file of a source edited or damaged since this package wrote it."""
    comparison = compare_digests(folder)
    changed = comparison.changed if comparison else ()
    return [f"{folder / file.name} has changed since it was written: {file.what}" for file in changed]


def _reorders_elements(checkpoint: CheckpointView, output: Output) -> bool:
    """Return True if matrices may be transposed or quantized, so that small blocks are slow to read.

    For merged weights it is False, because each number takes several times its own memory.
    """
    if checkpoint.composition.merged_from:
        return False
    is_reordered = any(placed.order is not None for record in output.records for placed in record.content)
    is_reordered = is_reordered or any(record.quantized is not None for record in output.records)
    return is_reordered or checkpoint.format.reader.is_model_folder


def _family_named(name: str) -> Family:
    from mcore_ckpt_ext.families.recognition import family_named  # all families take 0.1 s to import

    return family_named(name)


def _fingerprint(identity: tuple[object, ...], output: Output) -> str:
    """Hash the identity of a conversion: source, options, and all bytes known before reading tensors."""
    digest = hashlib.sha256(repr(identity).encode())
    for file in output.files:
        digest.update(repr((file.name, file.length)).encode())
        for position, data in file.literals:
            digest.update(repr(position).encode())
            digest.update(data)
    return digest.hexdigest()


def _checked_losses(checkpoint: CheckpointView, accept_lost: bool) -> dict[str, int]:
    """Return the number of elements that the source lacks, by parameter.

    Raises:
        ProofError: elements are missing, and the user did not accept it.
    """
    lost = dict(checkpoint.optimizer.state().lost_elements()) if checkpoint.optimizer.format() else {}
    if lost and not accept_lost:
        raise ProofError(
            "the checkpoint was written damaged: elements of the optimizer are missing",
            found=", ".join(f"{count} of {name}" for name, count in list(lost.items())[:8]),
            where=str(checkpoint.files.folder),
            hint="use another iteration, or accept the loss: --accept-lost",
        )
    return lost


def _differing_copies(checkpoint: CheckpointView, with_optimizer: bool, team: Communicator) -> list[str]:
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


def _check_digests(checkpoint: CheckpointView, team: Communicator) -> None:
    """Refuse remainders that have changed since they were saved; each process checks its share.

    Raises:
        ProofError: see `digests.check_digests`.
    """

    def own() -> None:
        for buffers in checkpoint.optimizer.state().buffers:
            check_digests(buffers, str(checkpoint.files.folder), (team.rank, team.size))

    run_on_all(team, own)


def _check_readable(folder: Path, source: CheckpointView, laid_out: OutputPlan) -> None:
    """Open the written folder as a reader would, and compare the names of its tensors with the source's."""
    written = (laid_out.reads_back or open_checkpoint)(folder)
    for kind in laid_out.kinds:
        expected = sorted(set(source.names(kind)) - set(laid_out.left_out))
        if sorted(written.names(kind)) != expected:
            raise DestinationError(
                "the written checkpoint differs from the source when read back; nothing was published",
                found=f"{counted(len(written.names(kind)), 'tensor')} of {kind}",
                expected=f"{len(expected)}",
                where=str(folder),
            )
