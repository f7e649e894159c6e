"""Converts a checkpoint into another format or layout: from a path to a published folder.

The target lays out its files, the source finds where each element lies, and the plan between the two is executed block
by block. Every master is compared with its weight on the way.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt_ext.communicator import ONE_PROCESS, Communicator, run_on_all, run_on_first, total
from mcore_ckpt_ext.errors import ProofError, reraise_as_unreadable
from mcore_ckpt_ext.families.config_keys import accept_keys
from mcore_ckpt_ext.formats.accounts import Account
from mcore_ckpt_ext.formats.laid_out import OutputPlan
from mcore_ckpt_ext.formats.unread_state import UnreadState
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.weight_shards import check_no_sharded_gates
from mcore_ckpt_ext.operations.block_reader import BlockReader
from mcore_ckpt_ext.operations.coverage import raise_first_contradiction
from mcore_ckpt_ext.operations.destination import Destination, checked_destination
from mcore_ckpt_ext.operations.execution import LocalExecution, RemoteExecution
from mcore_ckpt_ext.operations.options import ConversionOptions, Location
from mcore_ckpt_ext.operations.output_planning import lay_out
from mcore_ckpt_ext.operations.reading_back import read_back, refuse_replaced_files
from mcore_ckpt_ext.operations.short_repr import ShortRepr
from mcore_ckpt_ext.operations.source_checks import source_findings
from mcore_ckpt_ext.operations.source_notes import copies_notes, source_notes
from mcore_ckpt_ext.operations.source_state import FolderState, check_unchanged, folder_state, state_before
from mcore_ckpt_ext.operations.sources import open_source
from mcore_ckpt_ext.operations.unsupported_state import resolve_dropped_state
from mcore_ckpt_ext.optimizers.digests import check_digests
from mcore_ckpt_ext.planning.write_plan import Output
from mcore_ckpt_ext.storage.file_digests import with_checksums, with_digests
from mcore_ckpt_ext.storage.paths import as_path, is_remote
from mcore_ckpt_ext.storage.read_ahead import PART_BYTES
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
        options: the options of the conversion.
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
    options: ConversionOptions
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
    source: Location,
    destination: Location,
    target: Target | str,
    options: ConversionOptions | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    team: Communicator = ONE_PROCESS,
    **changes: object,
) -> Report:
    """Convert a checkpoint, optimizer included.

    Args:
        source: a run folder (its newest iteration), an iteration folder, a Hugging Face or a canonical folder.
        destination: the run folder to make (for `HuggingFace` and `Canonical` the folder itself).
        target: the format to write: `TorchDist(...)`, `Legacy(...)`, `FsdpDtensor()`, `HuggingFace(...)` or
            `Canonical()`; or its name, such as `torch_dist`.
        options: what is read besides the source, what is left out, and how the destination is written.
        progress: called with the bytes written so far and the bytes to write, of this process.
        team: the processes that share the work, each with the same arguments; by default only this one.
        **changes: single options by name, instead of or in addition to `options`: `convert(..., force=True)`.

    Raises:
        UsageError: an option is invalid for this source.
        TypeError: the target is no format to write, or there is no option of that name.
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
    conversion = _lay_out(as_path(source), target_of(target), (options or ConversionOptions()).with_changes(changes))
    place = checked_destination(destination, conversion.inputs(), conversion.plan.folder)
    with reraise_as_unreadable(conversion.checkpoint.files.folder):
        lost, notes = conversion.check_source(team)
    output = conversion.output
    reader = BlockReader(conversion.checkpoint, conversion.options.accept_lost)
    if not conversion.options.dry_run:
        notes += conversion.write(place, reader, progress, team)
    master_check = conversion.checkpoint.job.master_check
    return Report(
        destination=place.path,
        options=conversion.options,
        files=len(output.files),
        records=len(output.records),
        bytes_read=sum(record.nbytes for record in output.records),
        bytes_written=output.bytes_written,
        peak_memory=conversion.options.workers * _BLOCKS_AT_ONCE * conversion.block_bytes,
        proven_elements=total(team, reader.proven),
        seconds=time.monotonic() - begun,
        notes=notes,
        lost=lost,
        account=conversion.account,
        how=master_check.relation if master_check.is_approximate else "round to their weights",
    )


@dataclass(frozen=True)
class _Conversion:
    """A conversion of which all files are laid out, and nothing is written.

    Attributes:
        source: the source's path, as the user passed it.
        target: the format to write.
        options: the options.
        checkpoint: the source, without what is left out.
        account: what is done with each of its keys.
        plan: the files of the destination.
        states: the state of each folder that is read, from before it was read.
    """

    source: Path
    target: Target
    options: ConversionOptions
    checkpoint: CheckpointView
    account: Account
    plan: OutputPlan
    states: Mapping[Path, FolderState]

    @cached_property
    def output(self) -> Output:
        """All files with their bytes as far as they are known, the digests of the small ones among them."""
        return with_digests(self.plan.output, self.plan.folder)

    @property
    def reads_optimizer(self) -> bool:
        """True if the optimizer is converted, too."""
        return self.plan.reads_optimizer and self.checkpoint.optimizer.format() is not None

    def inputs(self) -> list[Path]:
        """Return all paths that are read, none of which may be replaced."""
        merge = [] if self.options.merge is None else [as_path(self.options.merge)]
        return [*self.states, self.source, *merge, *map(as_path, self.target.reads)]

    def check_source(self, team: Communicator) -> tuple[dict[str, int], list[str]]:
        """Check the source, and return what it lacks and what is worth a note.

        Returns:
            The number of elements that it lacks, by parameter, and notes for a user of the destination.

        Raises:
            ProofError: elements are missing, and the user did not accept it; or the source is damaged.
            CheckpointError: the source contradicts itself.
        """
        checkpoint = self.checkpoint
        lost = _checked_losses(checkpoint, self.options.accept_lost) if self.reads_optimizer else {}
        findings = [*source_findings(checkpoint, with_optimizer=self.reads_optimizer, incomplete=bool(lost))]
        raise_first_contradiction(checkpoint, (finding for finding in findings if finding.severity == "error"))
        if not self.options.dry_run:
            run_on_first(team, lambda: refuse_replaced_files(checkpoint.composition.merged_from or [checkpoint]))
            if self.reads_optimizer:
                _check_digests(checkpoint, team)
        return lost, [
            *self.output.notes,
            *source_notes(checkpoint, self.states, with_optimizer=self.plan.reads_optimizer),
            *(f"{finding.where}: {finding.what}" for finding in findings),
        ]

    @cached_property
    def block_bytes(self) -> int:
        """The largest size of a block, of which a worker has several at once."""
        cached = PART_BYTES if is_remote(self.checkpoint.files.folder) else _CACHED_BYTES
        largest = BLOCK_BYTES if _reorders_elements(self.checkpoint, self.output) else cached
        memory_of_worker = self.options.memory_limit // self.options.workers
        return max(_LEAST_BLOCK_BYTES, min(largest, memory_of_worker // _BLOCKS_AT_ONCE))

    def write(
        self, place: Destination, reader: BlockReader, progress: Callable[[int, int], None], team: Communicator
    ) -> list[str]:
        """Write, verify and publish all files, and return notes for a user of the destination.

        Raises:
            CheckpointError: the source has changed, or cannot be read or verified, or the destination not be written.
        """
        options = self.options
        with reraise_as_unreadable(self.checkpoint.files.folder):
            notes = copies_notes(self.checkpoint, self.reads_optimizer, team)
        dropped = sorted(options.dropped)
        sources = _identity_of_sources(self.states)
        identity = (*sources, self.target, options.family, options.accept_lost, dropped, options.facts)
        execute = RemoteExecution if is_remote(place.path) else LocalExecution
        execution = execute(place, _fingerprint(identity, self.output), team, options.workers, self.block_bytes)
        checks = (
            lambda: check_unchanged(self.states),
            lambda: with_checksums(self.output, read_back(execution.folder, self.checkpoint, self.plan)),
        )
        written = execution.write(self.output, reader, checks, progress, force=options.force, resume=options.resume)
        return [*notes, *written]


def _lay_out(source: Path, target: Target, options: ConversionOptions) -> _Conversion:
    """Open the source, and lay out the files of the destination.

    Raises:
        CheckpointError: the source cannot be read, or not be represented in this format.
    """
    family = _family_named(options.family) if options.family else None
    states = state_before(source)
    with accept_keys(options.accept_keys):
        checkpoint = open_source(source, target, family, options.facts, options.weights, options.merge)
    views = checkpoint.composition.merged_from or [checkpoint]
    folders = [view.files.folder for view in views]
    if options.weights is not None:
        folders.append(as_path(options.weights))
    states = {folder: states[folder] if folder in states else folder_state(folder) for folder in folders}
    with reraise_as_unreadable(checkpoint.files.folder):
        for view in views:
            check_no_sharded_gates(view.job.arguments(), str(view.files.folder))
        checkpoint, account = resolve_dropped_state(checkpoint, target, options.dropped)
        return _Conversion(source, target, options, checkpoint, account, lay_out(checkpoint, target, family), states)


def _identity_of_sources(states: Mapping[Path, FolderState]) -> tuple[object, ...]:
    """Return what shows that two conversions have the same sources, on any machine.

    Inodes and devices differ between machines that share the work, and after a restart.
    """
    return [*map(str, states)], [[entry[:3] for entry in state] for state in states.values()]


def _reorders_elements(checkpoint: CheckpointView, output: Output) -> bool:
    """Return True if matrices may be transposed or quantized, so that small blocks are slow to read.

    For merged weights it is False, because each number takes several times its own memory.
    """
    if checkpoint.composition.merged_from:
        return False
    is_reordered = any(placed.order is not None for record in output.records for placed in record.content)
    is_reordered = is_reordered or any(record.quantized is not None for record in output.records)
    return is_reordered or checkpoint.format.is_model_folder


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


def _check_digests(checkpoint: CheckpointView, team: Communicator) -> None:
    """Refuse remainders that have changed since they were saved; each process checks its share.

    Raises:
        ProofError: see `digests.check_digests`.
    """

    def own() -> None:
        for buffers in checkpoint.optimizer.state().buffers:
            check_digests(buffers, str(checkpoint.files.folder), (team.rank, team.size))

    run_on_all(team, own)
