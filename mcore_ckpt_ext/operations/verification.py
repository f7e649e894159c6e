"""Verifying a checkpoint: from what the folder shows, through what the metadata says, to every element."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from pathlib import Path

from mcore_ckpt_ext.defaults import DEFAULT_WORKERS
from mcore_ckpt_ext.errors import (
    CheckpointError,
    ProofError,
    UnreadableCheckpointError,
    UnsafePickleError,
    UnsupportedCheckpointError,
    readable,
    reraise_as_unreadable,
    some,
)
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.external_weights import NAME_THEM
from mcore_ckpt_ext.formats.portable_state import once, portable_group
from mcore_ckpt_ext.formats.steps import check_step
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.facts import NOTHING, Facts
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.completeness import check_folder, check_index, check_index_file, locate
from mcore_ckpt_ext.operations.content import ContentCheck, ParameterReport
from mcore_ckpt_ext.operations.coverage import check_arrays, check_groups, check_state, check_weights
from mcore_ckpt_ext.operations.findings import (
    CHECKSUMS,
    COMPLETE,
    COPIES,
    COVERED,
    DIGESTS,
    FILE_DIGESTS,
    KNOWN,
    MANIFEST,
    PROOF,
    VALUES,
    Check,
    Finding,
    Verification,
    error,
    warning,
)  # fmt: skip
from mcore_ckpt_ext.operations.group_settings import check_group_of_each, check_settings
from mcore_ckpt_ext.operations.integrity import (
    Archive,
    check_archives,
    check_bare_arrays,
    check_manifest,
    manifest_bytes,
    read_rest,
)
from mcore_ckpt_ext.operations.progress import ByteCounter, Progress
from mcore_ckpt_ext.operations.reading import threads
from mcore_ckpt_ext.optimizers.digests import differing
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.optimizers.table import opens_by_metadata
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.checksums import Confirmed
from mcore_ckpt_ext.storage.file_digests import compare_digests
from mcore_ckpt_ext.storage.paths import as_path

_FILES_GONE = "files of the optimizer's state are missing or cut off"


def verify(
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    workers: int = DEFAULT_WORKERS,
    progress: Progress = lambda done, total: None,
    facts: Facts = NOTHING,
    weights: str | os.PathLike[str] | None = None,
) -> Verification:
    """Verify a checkpoint.

    Args:
        path: a run folder (its newest iteration), an iteration folder, a canonical folder, or a Hugging Face folder
            that this package wrote.
        quick: look at metadata only.
        workers: threads.
        progress: told the bytes read so far and the bytes to read, about.
        facts: what you know of the job that wrote a checkpoint without Megatron's arguments.
        weights: where the weights lie, if the checkpoint holds an optimizer alone; its masters are proven by them.

    Raises:
        UsageError: facts are given of a checkpoint that describes its job itself, or they contradict its index.
        UnreadableCheckpointError: there is no checkpoint at all at that path.
        UnsupportedCheckpointError: its kind is not read.

    Example:
        >>> found = verify("run")
        >>> found.sound, found.findings
        (True, ())
        >>> [check.extent for check in found.checks if check.name == "proof"]
        ['53,536 masters equal to their weights']
    """
    located = locate(as_path(path))
    folder = located.folder or as_path(path)
    run = _Run(folder, quick, workers, progress, partial(open_checkpoint, folder, facts=facts, weights=weights))
    run.findings.extend(located.findings)
    if located.folder is not None:
        problems = check_folder(located.folder)
        run.findings.extend(problems)
        if not problems:
            run.verify_or_note()
    return Verification(str(run.folder), quick, tuple(run.checks), tuple(run.findings))


class _Run:
    """One verification, step by step; each step adds its findings and says what it looked at."""

    def __init__(
        self, folder: Path, quick: bool, workers: int, progress: Progress, opens: Callable[[], CheckpointView]
    ) -> None:
        self.folder, self._opens = folder, opens
        self.findings: list[Finding] = []
        self.checks: list[Check] = []
        self._quick, self._workers, self._progress = quick, workers, progress
        self.failed: set[str] = set()
        self._counter = ByteCounter(0, progress)

    def verify_or_note(self) -> None:
        """Run all steps; metadata that makes no sense is a finding."""
        try:
            with reraise_as_unreadable(self.folder):
                self.verify()
        except UnreadableCheckpointError as problem:
            self.findings.append(error(COMPLETE, str(self.folder), str(problem)))

    def verify(self) -> None:
        """All steps."""
        if not self._check_file_digests():
            return
        try:
            checkpoint = self._opens()
            names = checkpoint.names(WEIGHT)
            _ = checkpoint.common, checkpoint.layout, checkpoint.iteration
        except (UnreadableCheckpointError, UnsafePickleError) as problem:
            self.findings.append(error(COMPLETE, str(self.folder), str(problem)))
            return
        except ProofError as problem:
            self.findings.append(error(PROOF, str(self.folder), str(problem)))
            return
        if checkpoint.sidecar_problem:
            what = f"ignored: {checkpoint.sidecar_problem}"
            self.findings.append(warning(COMPLETE, str(self.folder / SIDECAR_FILE), what))
        problems = checkpoint.format_reader.problems
        self.findings.extend(warning(COMPLETE, str(self.folder), problem) for problem in problems)
        self.findings.extend(warning(COMPLETE, str(self.folder), what) for what in checkpoint.contradictions)
        failed = self.failed = self._check_files(checkpoint)
        self.findings.extend(check_weights(checkpoint))
        self.checks.append(Check(COVERED, f"{len(names):,} weights"))
        is_alone = not names and checkpoint.optimizer_format is not None
        if is_alone:
            what = f"it has an optimizer without weights, so its masters cannot be verified: {NAME_THEM}"
            self.findings.append(error(PROOF, str(self.folder), what))
        self._check_known(checkpoint)
        if self._quick:
            self._check_arrays(checkpoint)
            return
        self._counter = ByteCounter(self._bytes_to_read(checkpoint, failed), self._progress)
        confirmed = Confirmed(checkpoint.reader)
        # What the bytes show comes first, and is read last: most checksums are compared when the content is looked at.
        before = self.findings, self.checks
        self.findings, self.checks = [], []
        try:
            if not is_alone:  # else all that could be said of its state hangs on the weights
                self._check_content(checkpoint, self._check_state(checkpoint, failed), failed, confirmed)
        except Exception:
            self._check_bytes_before(*before, checkpoint, failed, confirmed)
            raise
        self._check_bytes_before(*before, checkpoint, failed, confirmed)
        self._counter.finish()

    def _check_bytes_before(
        self,
        findings: list[Finding],
        checks: list[Check],
        checkpoint: CheckpointView,
        failed: set[str],
        known: Confirmed,
    ) -> None:
        """Check the bytes; what that shows follows what was found before, and stands before what was found since."""
        since = self.findings, self.checks
        self.findings, self.checks = findings, checks
        self._check_bytes(checkpoint, failed, known)
        self.findings += since[0]
        self.checks += since[1]

    def _check_file_digests(self) -> bool:
        """Compare the small files with their digests, where there are some; returns whether the rest can be read."""
        try:
            found = compare_digests(self.folder)
        except UnreadableCheckpointError as problem:
            self.findings.append(error(FILE_DIGESTS, str(self.folder), str(problem)))
            return False
        if found is None:
            return True
        if found.stale:
            what = f"they are of files that were written over: {found.stale}"
            self.checks.append(Check(FILE_DIGESTS, what, done=False))
            return True
        for file in found.changed:
            kind = warning if file.editable else error
            self.findings.append(kind(FILE_DIGESTS, str(self.folder / file.name), file.what, file.name))
        self.checks.append(Check(FILE_DIGESTS, f"SHA-256 of {found.compared:,} files"))
        return all(file.editable for file in found.changed)

    def _check_known(self, checkpoint: CheckpointView) -> None:
        """Name the keys that no other check will look at."""
        try:
            unread = checkpoint.unread(objects=not self._quick)
        except CheckpointError as problem:  # damage, which other checks find
            self.checks.append(Check(KNOWN, str(problem), done=False))
            return
        for item in unread:
            if not item.why:
                what = f"{readable(item.nbytes)} unknown, not checked"
                self.findings.append(warning(KNOWN, item.key, what))
        others = f"all but {len(unread):,}: {some([item.key for item in unread])}"
        self.checks.append(Check(KNOWN, others if unread else "all"))

    def _check_files(self, checkpoint: CheckpointView) -> set[str]:
        index = checkpoint.format_reader.stored_index
        if index is None:
            self.checks.append(Check(COMPLETE, "the files of all ranks"))
            return set()
        findings, failed, files = check_index(checkpoint.reader, index)
        self.findings.extend(findings)
        if not self._quick and index.has_plans:
            self.findings.extend(check_index_file(self.folder))
        self.checks.append(Check(COMPLETE, f"{files:,} files"))
        return failed

    def _check_arrays(self, checkpoint: CheckpointView) -> None:
        """Optimizer state by metadata alone; which parameter lies where in flat buffers takes a look at elements."""
        with _FindingOnRefusal(self, COVERED):
            if checkpoint.optimizer_format is None or not opens_by_metadata(checkpoint.optimizer_format):
                return
            optimizer = checkpoint.optimizer
            for buffers in optimizer.buffers:
                self.findings.extend([*check_arrays(buffers), *check_groups(buffers)])
                self.checks.append(Check(COVERED, f"{len(buffers.groups):,} groups of flat optimizer arrays"))
            if not optimizer.buffers:
                self.findings.extend(check_state(checkpoint))
                self.checks.append(Check(COVERED, f"optimizer state of {len(optimizer.names()):,} parameters"))

    def _check_bytes(self, checkpoint: CheckpointView, failed: set[str], known: Confirmed) -> None:
        """Compare the checksums of all bytes but those that are known to be right."""
        read_rest(known, self._workers)
        manifest = manifest_bytes(self.folder)
        if manifest:
            self.findings.extend(check_manifest(self.folder, self._workers, self._counter.add))
            self.checks.append(Check(MANIFEST, f"SHA-256 of {manifest:,} bytes"))
        archives, arrays = _with_checksums(checkpoint, failed)
        left = [archive for archive in archives if archive not in known.right]
        self.findings.extend(check_archives(checkpoint, left, self._workers, self._counter.add, known))
        left_bare = [array for array in arrays if (array.file, array.offset, array.length) not in known.right]
        self.findings.extend(check_bare_arrays(checkpoint, left_bare, self._workers, self._counter.add))
        if guarded := _bytes_of(archives, arrays):
            self.checks.append(Check(CHECKSUMS, f"CRC-32 of {guarded:,} bytes"))
        if not manifest and _has_bare_numbers(checkpoint):
            what = "this format has no checksums of tensors: a flipped bit of a moment is not detected"
            self.checks.append(Check(CHECKSUMS, what, done=False))

    def _check_state(self, checkpoint: CheckpointView, failed: set[str]) -> bool:
        """Recover the packing where there is one to recover; returns whether the optimizer's state can be looked at."""
        if checkpoint.optimizer_format is None:
            if not checkpoint.format_reader.is_model_folder:
                self._without_optimizer()
            return False
        with _FindingOnRefusal(self, PROOF):
            check_step(checkpoint)
            groups = checkpoint.param_groups()
            once(map(portable_group, groups))
            if not groups:
                what = "the optimizer has no parameter groups: its step and other settings are missing"
                self.findings.append(error(COMPLETE, str(self.folder), what))
            self.findings.extend(check_settings(checkpoint, groups))
            optimizer = checkpoint.optimizer
            for buffers in optimizer.buffers:
                self.findings.extend([*check_arrays(buffers), *check_groups(buffers)])
                if not self._recover(buffers, failed):
                    return False
            self.findings.extend([*check_state(checkpoint), *check_group_of_each(checkpoint, groups)])
            self.checks.append(Check(COVERED, f"optimizer state of {len(optimizer.names()):,} parameters"))
            return True
        return False

    def _recover(self, optimizer: Buffers, failed: set[str]) -> bool:
        arrays = [array for of_group in optimizer.arrays.values() for array in of_group.values()]
        if failed & {piece.extent.file for array in arrays for piece in array.pieces}:
            self.checks.append(Check(PROOF, _FILES_GONE, done=False))
            return False
        before, looked_at = len(self.findings), len(self.checks)
        for group in optimizer.groups.values():
            with _FindingOnRefusal(self, PROOF, str(group)):
                if reason := optimizer.packing_of(group).disbelieved:
                    what = f"ignored for {group}: {reason}"
                    self.findings.append(warning(PROOF, str(self.folder / SIDECAR_FILE), what))
        wrong = any(finding.severity == "error" for finding in self.findings[before:])
        recovered = not wrong and all(check.done for check in self.checks[looked_at:])
        if recovered and optimizer.digests:
            problems = differing(optimizer)
            self.findings.extend(error(DIGESTS, str(self.folder / SIDECAR_FILE), problem) for problem in problems)
            self.checks.append(Check(DIGESTS, f"state of {len(optimizer.names()):,} parameters as it was saved"))
            return recovered and not problems
        return recovered

    def _without_optimizer(self) -> None:
        what = "it has no supported optimizer state: only its weights were checked"
        self.findings.append(warning(COVERED, str(self.folder), what))

    def _check_content(self, checkpoint: CheckpointView, state: bool, failed: set[str], confirmed: Confirmed) -> None:
        content = ContentCheck(checkpoint, state, failed, confirmed)

        def check(name: str) -> ParameterReport:
            try:
                report = content.check(name)
            except CheckpointError as problem:
                report = ParameterReport([error(PROOF, name, str(problem))])
            self._counter.add(report.bytes_read)
            return report

        names = dict.fromkeys([*checkpoint.names(WEIGHT), *(checkpoint.optimizer.names() if state else ())])
        with threads(self._workers) as pool:
            reports = list(pool.map(check, names))
        self.findings.extend(finding for report in reports for finding in report.findings)
        proven, joined = (sum(getattr(report, field) for report in reports) for field in ("proven", "joined"))
        if proven or not joined:
            how = "" if checkpoint.proof is BY_ROUNDING else f", {checkpoint.proof.words}"
            self.checks.append(Check(PROOF, f"{proven:,} masters equal to their weights{how}", done=proven > 0))
        if joined:
            known = " and ".join(checkpoint.optimizer.witnesses())
            what = f"{joined:,} masters joined from weights and remainders, placed by {known}"
            if checkpoint.weights_derived_from_masters:
                what = f"{joined:,} masters, stored in place of the weights, which are their roundings"
            self.checks.append(Check(PROOF, what))
        if copied := sum(report.copied for report in reports):
            self.checks.append(Check(COPIES, f"{copied:,} elements of tied or replicated copies"))
        self.checks.append(Check(VALUES, f"{sum(report.elements for report in reports):,} elements"))

    def _bytes_to_read(self, checkpoint: CheckpointView, failed: set[str]) -> int:
        guarded = _bytes_of(*_with_checksums(checkpoint, failed))
        tensors = [checkpoint.logical_tensor(WEIGHT, name) for name in checkpoint.names(WEIGHT)]
        weights = sum(prod(tensor.shape) * ITEM_SIZE[tensor.dtype] for tensor in tensors if tensor is not None)
        numel = sum(prod(tensor.shape) for tensor in tensors if tensor is not None)
        state = numel * 12 if checkpoint.optimizer_format else 0
        return guarded + manifest_bytes(self.folder) + weights + state


def _with_checksums(checkpoint: CheckpointView, failed: set[str]) -> tuple[list[Archive], list[RawArray]]:
    """What has checksums, in files that are there."""
    archives = [archive for archive in checkpoint.archives() if archive[0] not in failed]
    return archives, [array for array in checkpoint.checked_arrays() if array.file not in failed]


def _bytes_of(archives: Iterable[Archive], arrays: Iterable[RawArray]) -> int:
    return sum(length for *_, length in archives) + sum(array.length for array in arrays)


def _has_bare_numbers(checkpoint: CheckpointView) -> bool:
    """Whether tensors are stored as nothing but their elements."""
    stored = (one for name in checkpoint.names(WEIGHT) for one in checkpoint.stored(WEIGHT, name)[:1])
    return any(isinstance(one.extent, RawArray) and one.extent.crc is None for one in stored)


class _FindingOnRefusal:
    """Turns a refusal to read the optimizer into a finding."""

    def __init__(self, run: _Run, check: str, where: str = "") -> None:
        self._run, self._check, self._where = run, check, where or str(run.folder)

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: object) -> bool:
        if isinstance(problem, CheckpointError) and any(file in str(problem) for file in self._run.failed):
            # The file has its finding already.
            self._run.checks.append(Check(self._check, _FILES_GONE, done=False))
            return True
        if isinstance(problem, UnsupportedCheckpointError):
            # Nothing is wrong with what is not looked at.
            self._run.findings.append(warning(self._check, self._where, str(problem)))
            self._run.checks.append(Check(self._check, str(problem).partition(";")[0], done=False))
            return True
        if isinstance(problem, CheckpointError):
            self._run.findings.append(error(self._check, self._where, str(problem)))
            return True
        return False
