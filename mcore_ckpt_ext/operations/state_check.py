"""Checks optimizer state before its elements are read: by metadata, and by recovering its packing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mcore_ckpt_ext.errors import ContentError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.formats.portable_state import once, portable_group
from mcore_ckpt_ext.formats.steps import check_step
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.operations.coverage import check_arrays, check_groups, check_state
from mcore_ckpt_ext.operations.findings import COMPLETE, COVERED, DIGESTS, MASTERS, Check, Results, error, warning
from mcore_ckpt_ext.operations.group_settings import check_group_of_each, check_settings
from mcore_ckpt_ext.optimizers.digests import find_differences
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.optimizers.table import opens_by_metadata

_FILES_GONE = "files of the optimizer's state are missing or cut off"


class StateCheck:
    """The checks of one checkpoint's optimizer state.

    `unreadable`: files that are missing or truncated, and have a finding already.
    """

    def __init__(self, checkpoint: CheckpointView, results: Results, unreadable: set[str]) -> None:
        self._checkpoint = checkpoint
        self._results = results
        self._unreadable = unreadable
        self._folder = str(checkpoint.files.folder)

    def check_metadata(self) -> None:
        """Check the metadata; the packing of flat buffers is not recovered, because that reads elements."""
        checkpoint = self._checkpoint
        results = self._results
        with self._refusals(COVERED):
            optimizer_format = checkpoint.optimizer.format()
            if optimizer_format is None or not opens_by_metadata(optimizer_format):
                return
            optimizer = checkpoint.optimizer.state()
            for buffers in optimizer.buffers:
                results.findings.extend([*check_arrays(buffers), *check_groups(buffers)])
                results.checks.append(
                    Check(COVERED, f"{quantity(len(buffers.groups), 'group')} of flat optimizer arrays")
                )
            if not optimizer.buffers:
                results.findings.extend(check_state(checkpoint))
                results.checks.append(
                    Check(COVERED, f"optimizer state of {quantity(len(optimizer.names()), 'parameter')}")
                )

    def recover(self) -> bool:
        """Check everything but the elements, and recover the packing of flat buffers.

        Returns:
            True if the state can be read parameter by parameter.
        """
        checkpoint = self._checkpoint
        findings = self._results.findings
        if checkpoint.optimizer.format() is None:
            if not checkpoint.format.is_model_folder:
                message = "it has no supported optimizer state: only its weights were checked"
                findings.append(warning(COVERED, self._folder, message))
            return False
        with self._refusals(MASTERS):
            check_step(checkpoint)
            groups = checkpoint.optimizer.param_groups()
            once(map(portable_group, groups))
            if not groups:
                message = "the optimizer has no parameter groups: its step and other settings are missing"
                findings.append(error(COMPLETE, self._folder, message))
            findings.extend(check_settings(checkpoint, groups))
            optimizer = checkpoint.optimizer.state()
            if all(map(self._recover_packing, optimizer.buffers)):
                findings.extend([*check_state(checkpoint), *check_group_of_each(checkpoint, groups)])
                message = f"optimizer state of {quantity(len(optimizer.names()), 'parameter')}"
                self._results.checks.append(Check(COVERED, message))
                return True
        return False

    def _recover_packing(self, optimizer: Buffers) -> bool:
        findings = self._results.findings
        checks = self._results.checks
        findings.extend([*check_arrays(optimizer), *check_groups(optimizer)])
        arrays = [array for of_group in optimizer.arrays.values() for array in of_group.values()]
        if self._unreadable & {piece.extent.file for array in arrays for piece in array.pieces}:
            checks.append(Check(MASTERS, _FILES_GONE, done=False))
            return False
        sidecar = str(self._checkpoint.files.folder / SIDECAR_FILE)
        before = len(findings)
        looked_at = len(checks)
        for group in optimizer.groups.values():
            with self._refusals(MASTERS, str(group)):
                if reason := optimizer.packing_of(group).sidecar_problem:
                    findings.append(warning(MASTERS, sidecar, f"ignored for {group}: {reason}"))
        wrong = any(finding.severity == "error" for finding in findings[before:])
        recovered = not wrong and all(check.done for check in checks[looked_at:])
        if recovered and optimizer.digests:
            problems = find_differences(optimizer)
            findings.extend(error(DIGESTS, sidecar, problem) for problem in problems)
            checks.append(Check(DIGESTS, f"state of {quantity(len(optimizer.names()), 'parameter')} as it was saved"))
            return recovered and not problems
        return recovered

    @contextmanager
    def _refusals(self, check: str, where: str = "") -> Iterator[None]:
        """Turn a refusal to read the optimizer into a finding."""
        findings = self._results.findings
        checks = self._results.checks
        where = where or self._folder
        try:
            yield
        except ContentError as problem:
            if any(file in str(problem) for file in self._unreadable):
                # The file has a finding already.
                checks.append(Check(check, _FILES_GONE, done=False))
            elif isinstance(problem, UnsupportedCheckpointError):
                # Unsupported state is not an error.
                findings.append(warning(check, where, str(problem)))
                checks.append(Check(check, str(problem).partition(";")[0], done=False))
            else:
                findings.append(error(check, where, str(problem)))
