"""The checks of `verify` that read no tensor, for a conversion, which carries no error."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_ckpt_ext.formats.portable_state import once, portable_group
from mcore_ckpt_ext.formats.steps import check_step
from mcore_ckpt_ext.formats.unread_state import OTHER, optimizer_kind
from mcore_ckpt_ext.formats.view import CheckpointView, carried_kinds
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.completeness import check_index
from mcore_ckpt_ext.operations.coverage import check_arrays, check_groups, check_kind, check_state, check_stored_once
from mcore_ckpt_ext.operations.findings import Finding
from mcore_ckpt_ext.operations.group_settings import check_group_of_each, check_settings


def source_findings(checkpoint: CheckpointView, *, with_optimizer: bool, incomplete: bool) -> Iterator[Finding]:
    """Yield what the metadata of a conversion's source shows to be wrong, as `verify` does.

    Args:
        checkpoint: the source.
        with_optimizer: whether its optimizer is converted, too.
        incomplete: whether the user accepts that elements of the optimizer are missing.

    Raises:
        UnreadableCheckpointError: the parameter groups of the optimizer contradict each other.
    """
    for source in checkpoint.composition.merged_from or (checkpoint,):
        yield from _check_files(source, with_optimizer=with_optimizer)
    yield from check_kind(checkpoint, WEIGHT)
    if not with_optimizer:
        return
    groups = checkpoint.optimizer.param_groups()
    check_step(checkpoint)
    once(map(portable_group, groups))
    yield from check_settings(checkpoint, groups)
    yield from check_group_of_each(checkpoint, groups)
    yield from check_stored_once(checkpoint, carried_kinds(checkpoint))
    if incomplete:
        return
    of_state = [*check_state(checkpoint)]
    for buffers in checkpoint.optimizer.state().buffers:
        of_state += [*check_arrays(buffers), *check_groups(buffers)]
    yield from (finding for finding in of_state if finding.severity == "error")


def _check_files(checkpoint: CheckpointView, *, with_optimizer: bool) -> Iterator[Finding]:
    """Check the files that a conversion reads, and that each record of the index has its own place."""
    index = checkpoint.files.stored_index()
    if index is None:
        return
    findings, _, _ = check_index(
        checkpoint.files.reader, index, lambda key: with_optimizer or optimizer_kind(key) == OTHER
    )
    yield from (finding for finding in findings if finding.severity == "error")
