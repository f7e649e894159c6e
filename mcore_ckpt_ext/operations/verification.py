"""Verifies a checkpoint: its files, its metadata, and every element."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from mcore_ckpt_ext.communicator import ONE_PROCESS, Communicator, run_on_all
from mcore_ckpt_ext.defaults import DEFAULT_WORKERS
from mcore_ckpt_ext.errors import (
    CheckpointError,
    ContentError,
    ProofError,
    UnreadableCheckpointError,
    UnsafePickleError,
    UnsupportedCheckpointError,
    UsageError,
    counted,
    format_bytes,
    join_some,
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
from mcore_ckpt_ext.job.facts import NOTHING, Facts
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
from mcore_ckpt_ext.operations.progress import ByteCounter, Progress
from mcore_ckpt_ext.operations.recording import (
    Digests,
    TensorSource,
    check_manifest_path,
    compare_tensors_with_manifest,
    compare_with_manifest,
    write_manifest,
)
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
from mcore_ckpt_ext.storage.manifest import read_manifest
from mcore_ckpt_ext.storage.paths import as_path

_NOT_RECOVERED = "it cannot be read parameter by parameter"


def verify(
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    workers: int = DEFAULT_WORKERS,
    progress: Progress = lambda done, total: None,
    facts: Facts = NOTHING,
    weights: str | os.PathLike[str] | None = None,
    record: str | os.PathLike[str] | None = None,
    against: str | os.PathLike[str] | None = None,
    tensors_only: bool = False,
    team: Communicator = ONE_PROCESS,
    index: FolderIndex | None = None,
) -> Verification:
    """Verify a checkpoint.

    Args:
        path: a run folder (its newest iteration), an iteration folder, or a canonical, Hugging Face, PEFT or
            ColossalAI folder.
        quick: check only metadata.
        workers: the number of threads.
        progress: called with the bytes read so far and an estimate of the bytes to read.
        facts: facts about the job that wrote a checkpoint without Megatron's arguments.
        weights: the path of the weights, if the checkpoint holds only an optimizer, whose masters they verify; for
            adapters, the path of their model.
        record: a manifest to write, with the SHA-256 of each file and each tensor, if there is no error.
        against: a manifest to compare with.
        tensors_only: compare only tensors with the manifest, since a conversion changes all files.
        team: the processes that share the reading, each with the same arguments; all return the same. Only the first
            writes a manifest.
        index: the index of the iteration folder, if it has been used before.

    Raises:
        UsageError: options contradict each other, or facts contradict the index or the checkpoint's own description of
            its job.
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
    if quick and (record is not None or against is not None):
        raise UsageError("a manifest is of all bytes, which --quick does not read", hint="leave out --quick")
    if tensors_only and against is None:
        raise UsageError("--tensors-only needs a manifest to compare with", hint="--against FILE")
    manifest = None if against is None else read_manifest(as_path(against))
    if record is not None:
        check_manifest_path(as_path(record))
    located = find_checkpoint(as_path(path), index)
    folder = located.folder or as_path(path)
    stored = located.index or FolderIndex(folder)
    opens = partial(open_checkpoint, folder, facts=facts, weights=weights, index=stored)
    shared = Workers(team, workers)
    run = _Run(stored, quick, shared, progress, opens)
    run.hashes_tensors = record is not None or tensors_only
    run.hashes_files = record is not None or (against is not None and not tensors_only)
    run.results.findings.extend(located.findings)
    if located.folder is not None:
        problems = check_folder(stored)
        run.results.findings.extend(problems)
        if not problems:
            run.verify_or_note()
        if manifest is not None and tensors_only:
            compare_tensors_with_manifest(manifest, run.source, run.digests, shared, run.results)
        elif manifest is not None and against is not None:
            paths = (as_path(against), folder)
            whole = weights is None
            compare_with_manifest(manifest, *paths, run.source, run.digests, shared, run.results, files_suffice=whole)
    checks = tuple(run.results.checks)
    findings = tuple(run.results.findings)
    verification = Verification(
        str(run.folder), quick, checks, findings, iteration=_iteration(run.source), account=run.results.account
    )
    if record is None or run.source is None or not verification.sound:
        return verification
    write_manifest(as_path(record), folder, run.source, run.digests, shared)
    return replace(verification, recorded=str(record))


class _Run:
    """One verification; each step adds its findings, and the extent of its checks."""

    def __init__(
        self,
        stored: FolderIndex,
        quick: bool,
        workers: Workers,
        progress: Progress,
        opens: Callable[[], CheckpointView],
    ) -> None:
        self.folder = stored.folder
        self._stored = stored
        self._opens = opens
        self.results = Results()
        self.source: TensorSource | None = None
        self.digests = Digests()
        self.hashes_tensors = False
        self.hashes_files = False
        self._quick = quick
        self._workers = workers
        self._progress = progress

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
        folder_format = format_of(self.folder, self._stored)
        if folder_format is not None and (listing := folder_format.list_tensors(self.folder)) is not None:
            self._verify_listed(listing)
            return
        try:
            checkpoint = self._opens()
            _ = checkpoint.names(WEIGHT), checkpoint.job.common(), checkpoint.job.layout, checkpoint.job.iteration()
        except (UnreadableCheckpointError, UnsafePickleError) as problem:
            self._error(COMPLETE, problem)
        except ProofError as problem:
            self._error(MASTERS, problem)
        else:
            self.source = checkpoint
            unreadable = self._check_metadata(checkpoint)
            if self._quick:
                StateCheck(checkpoint, self.results, unreadable).check_metadata()
            else:
                self._check_bytes(checkpoint, unreadable)

    def _verify_listed(self, listing: Listing) -> None:
        """Verify a folder of weights: files and elements as they are stored, names and shapes by its model."""
        check_listing(listing, self.results)
        if listing.is_readable:
            self.source = listing
            try:
                self.source = checkpoint = self._opens()
                self._check_weights(checkpoint, listing.described)
            except UnsupportedCheckpointError as problem:
                self.results.account = account_without_model(listing)
                reason = "; ".join(filter(None, map(problem.details.get, ("found", "hint"))))
                message = f"names and shapes are not compared with a model: {problem.message}; {reason}"
                self.results.checks.append(Check(COVERED, message, done=False))
            except (UnreadableCheckpointError, UnsafePickleError) as problem:
                self._error(COVERED, problem)
        if not self._quick:
            counter = ByteCounter(listed_bytes(listing), self._progress)
            # The tensors of model space differ from the stored ones.
            self.digests = check_stored_tensors(
                listing,
                self._workers,
                counter.add,
                self.results,
                digest_tensors=self.hashes_tensors and self.source is listing,
                digest_files=self.hashes_files,
            )
            counter.finish()

    def _check_weights(self, checkpoint: CheckpointView, described: Collection[str] = ()) -> None:
        self.results.findings.extend(check_kind(checkpoint, WEIGHT))
        self.results.checks.append(Check(COVERED, counted(len(checkpoint.names(WEIGHT)), "weight")))
        self._check_known(checkpoint, described)

    def _check_metadata(self, checkpoint: CheckpointView) -> set[str]:
        """Check what needs no tensor; return the files that are missing or truncated."""
        findings = self.results.findings
        if problem := checkpoint.job.found_sidecar().problem:
            findings.append(warning(COMPLETE, str(self.folder / SIDECAR_FILE), f"ignored: {problem}"))
        for message in (*checkpoint.format.reader.problems, *contradictions(checkpoint)):
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
        counter = ByteCounter(checksums.nbytes + content_bytes(checkpoint), self._progress)
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
        check = ContentCheck(checkpoint, reads_state, unreadable, confirmed, digest_tensors=self.hashes_tensors)
        self.digests.tensors = check_parameters(check, self._workers, counter.add, results)

    def _check_known(self, checkpoint: CheckpointView, described: Collection[str]) -> None:
        """Report the keys that no other check reads."""
        try:
            account = account_of(checkpoint, elements=not self._quick, described=described)
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
        index = checkpoint.format.reader.stored_index
        if index is None:
            self.results.checks.append(Check(COMPLETE, "the files of all ranks"))
            return set()
        findings, unreadable, files = check_index(checkpoint.files.reader, index)
        self.results.findings.extend(findings)
        if not self._quick and index.has_plans:
            self.results.findings.extend(check_index_file(self.folder))
        self.results.checks.append(Check(COMPLETE, counted(files, "file")))
        return unreadable

    def _error(self, check: str, problem: CheckpointError) -> None:
        self.results.findings.append(error(check, str(self.folder), str(problem)))


def _iteration(source: TensorSource | None) -> int | None:
    return source.job.iteration() if isinstance(source, CheckpointView) and not source.job.is_release else None


def _has_optimizer_alone(checkpoint: CheckpointView) -> bool:
    return not checkpoint.names(WEIGHT) and checkpoint.optimizer.format() is not None
