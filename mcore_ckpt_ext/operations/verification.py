"""Verifies a checkpoint: its files, its metadata, and every element."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from mcore_ckpt_ext.communicator import ONE_PROCESS, Communicator, run_on_all
from mcore_ckpt_ext.errors import (
    CheckpointError,
    ContentError,
    ProofError,
    UnreadableCheckpointError,
    UnsafePickleError,
    UnsupportedCheckpointError,
    UsageError,
    format_bytes,
    join_some,
    quantity,
    reraise_as_unreadable,
)
from mcore_ckpt_ext.formats.accounts import account_of
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.external_weights import NAME_THEM
from mcore_ckpt_ext.formats.listing import Listing
from mcore_ckpt_ext.formats.messages import contradictions
from mcore_ckpt_ext.formats.registry import format_of
from mcore_ckpt_ext.formats.unread_state import is_of_optimizer
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.completeness import check_folder, check_index, check_index_file, find_checkpoint
from mcore_ckpt_ext.operations.content import ContentCheck, check_parameters, content_bytes
from mcore_ckpt_ext.operations.coverage import check_kind
from mcore_ckpt_ext.operations.findings import (
    COMPLETE,
    COVERED,
    KNOWN,
    MASTERS,
    Check,
    Results,
    Verification,
    error,
    warning,
)
from mcore_ckpt_ext.operations.integrity import StoredChecksums, check_file_digests
from mcore_ckpt_ext.operations.layout_rules import refusal_of_stored_files
from mcore_ckpt_ext.operations.options import Location, VerificationOptions
from mcore_ckpt_ext.operations.progress import ByteCounter, Progress
from mcore_ckpt_ext.operations.recording import Digests, Recording, TensorSource, check_manifest_path
from mcore_ckpt_ext.operations.state_check import StateCheck
from mcore_ckpt_ext.operations.stored_tensors import (
    account_without_model,
    check_listing,
    check_stored_tensors,
    listed_bytes,
)
from mcore_ckpt_ext.operations.workers import Workers
from mcore_ckpt_ext.storage.checksums import LenientChecksums
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.manifest import Manifest, read_manifest
from mcore_ckpt_ext.storage.paths import as_path

_NOT_RECOVERED = "it cannot be read parameter by parameter"


def verify(
    path: Location,
    options: VerificationOptions | None = None,
    *,
    progress: Progress = lambda done, total: None,
    team: Communicator = ONE_PROCESS,
    index: FolderIndex | None = None,
    **changes: object,
) -> Verification:
    """Verify a checkpoint.

    Args:
        path: a run folder (its newest iteration), an iteration folder, or a canonical, Hugging Face, PEFT or
            ColossalAI folder.
        options: what is verified, and the manifest to write or to compare with.
        progress: called with the bytes read so far and an estimate of the bytes to read.
        team: the processes that share the reading, each with the same arguments; all return the same. Only the first
            writes a manifest.
        index: the index of the iteration folder, if it has been used before.
        **changes: single options by name, instead of or in addition to `options`: `verify(path, quick=True)`.

    Raises:
        UsageError: options contradict each other or the manifest, or facts contradict the index or the checkpoint's own
            description of its job.
        TypeError: there is no option of that name.
        UnreadableCheckpointError: there is no checkpoint at that path, or no manifest.
        DestinationError: the manifest cannot be written.
        UnsupportedCheckpointError: this package does not read its kind.

    Example:
        >>> found = verify("run")
        >>> found.sound, found.findings
        (True, ())
        >>> [check.extent for check in found.checks if check.name == "masters"]
        ['53,536 masters equal to their weights']
    """
    options = (options or VerificationOptions()).with_changes(changes)
    options.check()
    against = None if options.against is None else as_path(options.against)
    manifest = None if against is None else _manifest_to_compare(against, options)
    if options.record is not None:
        check_manifest_path(as_path(options.record))
    located = find_checkpoint(as_path(path), index)
    folder = located.folder or as_path(path)
    run = _Run(located.index or FolderIndex(folder), options, Workers(team, options.workers), progress)
    run.results.findings.extend(located.findings)
    if located.folder is not None:
        problems = check_folder(run.stored)
        run.results.findings.extend(problems)
        if all(problem.severity == "warning" for problem in problems):
            run.verify_or_note()
        if against is not None and manifest is not None:
            run.compare_with(manifest, against)
    verification = run.verification()
    if options.record is None or run.source is None or not verification.sound:
        return verification
    run.recording().write(as_path(options.record))
    return replace(verification, recorded=str(options.record))


def _manifest_to_compare(path: Path, options: VerificationOptions) -> Manifest:
    """Read a manifest.

    Raises:
        UsageError: tensors alone are to be compared, and it lists none.
        UnreadableCheckpointError: it cannot be read.
    """
    manifest = read_manifest(path)
    if options.tensors_only and not manifest.has_tensors:
        raise UsageError(
            "there are no tensors to compare",
            found="a list of files alone, as of sha256sum",
            where=str(path),
            hint="leave out --tensors-only, or pass a manifest of mcore-ckpt verify PATH --record FILE",
        )
    return manifest


class _Run:
    """One verification; each step adds its findings, and the extent of its checks."""

    def __init__(self, stored: FolderIndex, options: VerificationOptions, workers: Workers, progress: Progress) -> None:
        self.folder = stored.folder
        self.stored = stored
        self._workers = workers
        self.results = Results()
        self.source: TensorSource | None = None
        self.digests = Digests()
        self._options = options
        self._progress = progress

    def verification(self) -> Verification:
        """Return the result of all steps so far."""
        results = self.results
        return Verification(
            path=str(self.folder),
            options=self._options,
            checks=tuple(results.checks),
            findings=tuple(results.findings),
            iteration=_iteration(self.source),
            account=results.account,
        )

    def recording(self) -> Recording:
        """Return the files and tensors that a manifest records, with what is known of them so far."""
        return Recording(self.folder, self.source, self.digests, self._workers)

    def compare_with(self, manifest: Manifest, path: Path) -> None:
        """Compare the checkpoint with the manifest at `path`."""
        if self._options.tensors_only:
            self.recording().compare_tensors(manifest, self.results)
        else:
            files_suffice = self._options.weights is None
            self.recording().compare(manifest, path, self.results, files_suffice=files_suffice)

    def _open(self) -> CheckpointView:
        options = self._options
        return open_checkpoint(self.folder, facts=options.facts, weights=options.weights, index=self.stored)

    def verify_or_note(self) -> None:
        """Run all steps; invalid metadata is a finding."""
        try:
            with reraise_as_unreadable(self.folder):
                self._verify()
        except UnreadableCheckpointError as problem:
            self._error(COMPLETE, problem)

    def _verify(self) -> None:
        if not check_file_digests(self.folder, self.results):
            return
        folder_format = format_of(self.folder, self.stored)
        if folder_format is not None and (listing := folder_format.list_tensors(self.folder)) is not None:
            self._verify_listed(listing)
            return
        try:
            checkpoint = self._open()
            _ = checkpoint.names(WEIGHT), checkpoint.job.common(), checkpoint.job.layout, checkpoint.job.iteration()
        except (UnreadableCheckpointError, UnsafePickleError) as problem:
            self._error(COMPLETE, problem)
        except ProofError as problem:
            self._error(MASTERS, problem)
        else:
            self.source = checkpoint
            unreadable = self._check_metadata(checkpoint)
            if self._options.quick:
                StateCheck(checkpoint, self.results, unreadable).check_metadata()
            else:
                self._check_bytes(checkpoint, unreadable)

    def _verify_listed(self, listing: Listing) -> None:
        """Verify a folder of weights: files and elements as they are stored, names and shapes by its model."""
        check_listing(listing, self.results)
        if listing.is_readable:
            self.source = listing
            try:
                self.source = checkpoint = self._open()
                self._check_weights(checkpoint, listing.described)
            except UnsupportedCheckpointError as problem:
                self.results.account = account_without_model(listing)
                reason = "; ".join(filter(None, map(problem.details.get, ("found", "hint"))))
                message = f"names and shapes are not compared with a model: {problem.message}; {reason}"
                self.results.checks.append(Check(COVERED, message, done=False))
            except (UnreadableCheckpointError, UnsafePickleError) as problem:
                self._error(COVERED, problem)
        if not self._options.quick:
            counter = ByteCounter(listed_bytes(listing), self._progress)
            # The tensors of model space differ from the stored ones.
            self.digests = check_stored_tensors(
                listing,
                self._workers,
                counter.add,
                self.results,
                digest_tensors=self._options.hashes_tensors and self.source is listing,
                digest_files=self._options.hashes_files,
            )
            counter.finish()

    def _check_weights(self, checkpoint: CheckpointView, described: Collection[str] = ()) -> None:
        self.results.findings.extend(check_kind(checkpoint, WEIGHT))
        self.results.checks.append(Check(COVERED, quantity(len(checkpoint.names(WEIGHT)), "weight")))
        self._check_known(checkpoint, described)

    def _check_metadata(self, checkpoint: CheckpointView) -> set[str]:
        """Check what needs no tensor; return the files that are missing or truncated."""
        findings = self.results.findings
        if problem := checkpoint.job.found_sidecar().problem:
            findings.append(warning(COMPLETE, str(self.folder / SIDECAR_FILE), f"ignored: {problem}"))
        for message in (*checkpoint.job.problems(), *contradictions(checkpoint)):
            findings.append(warning(COMPLETE, str(self.folder), message))
        unreadable = self._check_files(checkpoint)
        if reason := refusal_of_stored_files(checkpoint):
            message = f"no release of Megatron reads files of this layout, {checkpoint.job.layout}: {reason}"
            findings.append(error(COMPLETE, str(self.folder), message))
        self._check_weights(checkpoint)
        if _has_optimizer_alone(checkpoint):
            message = f"it has an optimizer without weights, so its masters cannot be verified: {NAME_THEM}"
            findings.append(error(MASTERS, str(self.folder), message))
        return unreadable

    def _check_bytes(self, checkpoint: CheckpointView, unreadable: set[str]) -> None:
        """Check the elements, and then the checksums of records that were not read completely.

        Findings of checksums are listed first: damaged bytes explain the other findings.
        """
        checksums = StoredChecksums(checkpoint, unreadable)
        counter = ByteCounter(checksums.bytes_to_read(content_bytes(checkpoint)), self._progress)
        confirmed = LenientChecksums(checkpoint.files.reader)
        of_elements = Results()
        damage: CheckpointError | None = None
        try:
            # No checksum is compared after any other error, such as an interrupt or a broken installation of torch.
            with reraise_as_unreadable(self.folder):
                self._check_elements(checkpoint, unreadable, confirmed, counter, of_elements)
        except ContentError as error:
            damage = error
        checksums.check(confirmed, self._workers, counter.add, self.results)
        self.results.extend(of_elements)
        if damage is not None:
            raise damage
        counter.finish()

    def _check_elements(
        self,
        checkpoint: CheckpointView,
        unreadable: set[str],
        confirmed: LenientChecksums,
        counter: ByteCounter,
        results: Results,
    ) -> None:
        if _has_optimizer_alone(checkpoint):  # without weights its state cannot be checked
            return
        state_check = StateCheck(checkpoint, results, unreadable)
        reads_state = run_on_all(self._workers.team, state_check.recover)
        # Without an account there is damage that keeps the keys from being listed, and that other checks report.
        if checkpoint.optimizer.format() and not reads_state and self.results.account is not None:
            self.results.account = account_of(checkpoint, leaves_out=is_of_optimizer, why=_NOT_RECOVERED)
        check = ContentCheck(
            checkpoint, reads_state, unreadable, confirmed, digest_tensors=self._options.hashes_tensors
        )
        self.digests.tensors = check_parameters(check, self._workers, counter.add, results)

    def _check_known(self, checkpoint: CheckpointView, described: Collection[str]) -> None:
        """Report the keys that no other check reads."""
        try:
            account = account_of(checkpoint, elements=not self._options.quick, described=described)
        except ContentError as problem:  # damage, which other checks report
            self.results.checks.append(Check(KNOWN, str(problem), done=False))
            return
        unread = account.not_looked_at
        self.results.account = account
        for item in account.unknown:
            message = f"{format_bytes(item.nbytes)} unknown, not checked"
            self.results.findings.append(warning(KNOWN, item.key, message))
        others = f"all but {len(unread):,}: {join_some([item.key for item in unread])}"
        self.results.checks.append(Check(KNOWN, others if unread else "all"))

    def _check_files(self, checkpoint: CheckpointView) -> set[str]:
        """Check that the files have all of their records; return those that are missing or truncated."""
        index = checkpoint.files.stored_index()
        if index is None:
            self.results.checks.append(Check(COMPLETE, "the files of all ranks"))
            return set()
        findings, unreadable, files = check_index(checkpoint.files.reader, index)
        self.results.findings.extend(findings)
        if not self._options.quick and index.has_plans:
            self.results.findings.extend(check_index_file(self.folder))
        self.results.checks.append(Check(COMPLETE, quantity(files, "file")))
        return unreadable

    def _error(self, check: str, problem: CheckpointError) -> None:
        self.results.findings.append(error(check, str(self.folder), str(problem)))


def _iteration(source: TensorSource | None) -> int | None:
    return source.job.iteration() if isinstance(source, CheckpointView) and not source.job.is_release else None


def _has_optimizer_alone(checkpoint: CheckpointView) -> bool:
    return not checkpoint.names(WEIGHT) and checkpoint.optimizer.format() is not None
