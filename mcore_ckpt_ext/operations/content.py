"""Checks elements: masters against weights, copies for equality, and impossible values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod

import numpy as np

from mcore_ckpt_ext.errors import ContentError, join_some, quantity
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import EXP_AVG_SQ, FP32_PARAM, PARAM_REMAINDER, WEIGHT, LogicalTensor
from mcore_ckpt_ext.operations.findings import COPIES, MASTERS, VALUES, Check, Finding, Results, error, warning
from mcore_ckpt_ext.operations.reading import BlockMemory, blocks, with_cache
from mcore_ckpt_ext.operations.recording import TensorHash
from mcore_ckpt_ext.operations.replicas import compared_copies, is_left_by_offload
from mcore_ckpt_ext.operations.workers import Workers
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.stored_scales import check_at_stored_scales
from mcore_ckpt_ext.optimizers.tied_copies import bits_of
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, Source, TargetSlice
from mcore_ckpt_ext.planning.source_view import SourceView
from mcore_ckpt_ext.storage.checksums import Checksums
from mcore_ckpt_ext.storage.manifest import TensorDigest
from mcore_ckpt_ext.transfer import Transfer, read_slice, target_slice


@dataclass
class ParameterReport:
    """The findings and counts for one name; counts in elements, `bytes_read` of first copies.

    `compared`: masters that were compared; `wrong`: those that differ;
    `joined`: masters that are joined from their weights and remainders.
    """

    findings: list[Finding] = field(default_factory=list)
    compared: int = 0
    wrong: int = 0
    joined: int = 0
    copied: int = 0
    elements: int = 0
    bytes_read: int = 0
    digests: list[TensorDigest] = field(default_factory=list)


@dataclass
class ValueCounts:
    """Counts over the blocks of one tensor."""

    nan: int = 0
    infinite: int = 0
    negative: int = 0
    wrong: int = 0
    first: tuple[int, float, float] | None = None


class ContentCheck:
    """Checks the elements of a checkpoint, one parameter at a time; thread-safe.

    Args:
        checkpoint: the checkpoint; its packing, if it needs one, has been recovered.
        reads_state: True if its optimizer state can be read.
        unreadable: files that are known to be missing or truncated; their content is skipped.
        checksums: checksums to compare on the way, if any.
        digest_tensors: also compute the SHA-256 of each tensor.
    """

    def __init__(
        self,
        checkpoint: CheckpointView,
        reads_state: bool,
        unreadable: set[str],
        checksums: Checksums | None = None,
        *,
        digest_tensors: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        # One thread, because the caller divides the blocks between threads.
        self._transfer = Transfer(checkpoint.files.reader.past_cache(), workers=1, checksums=checksums)
        self._sources = {WEIGHT: with_cache(checkpoint.model.weights())}
        self._memory = BlockMemory()
        self._unreadable = unreadable
        self._digest_tensors = digest_tensors
        self._optimizer = checkpoint.optimizer.state() if reads_state else None
        self._shifted = set(self._optimizer.shifted) if self._optimizer else set()
        if self._optimizer is not None:
            self._sources |= dict.fromkeys(self._optimizer.kinds, with_cache(self._optimizer))

    def names(self) -> list[str]:
        """Return all parameters with a weight or with state that can be read."""
        with_state = () if self._optimizer is None else self._optimizer.names()
        return list(dict.fromkeys([*self.checkpoint.names(WEIGHT), *with_state]))

    def check(self, name: str) -> ParameterReport:
        """Check all elements of one parameter.

        Raises:
            CheckpointError: a part of it cannot be read.
        """
        report = ParameterReport()
        tensors = {kind: source.logical_tensor(kind, name) for kind, source in self._sources.items()}
        held = {
            kind: tensor for kind, tensor in tensors.items() if tensor is not None and self._is_readable(kind, name)
        }
        if self._optimizer is not None and name in self._shifted:
            report.findings += self._check_shifted(self._optimizer, name, held, report)
            held = {kind: tensor for kind, tensor in held.items() if kind == WEIGHT}
        shapes = {tensor.shape for tensor in held.values()}
        if len(shapes) > 1:
            shapes_of = {kind: tensor.shape for kind, tensor in held.items()}
            report.findings.append(error(MASTERS, name, f"its kinds differ in shape: {shapes_of}"))
            return report
        if held:
            self._check_elements(name, held, report)
        for kind in held:
            self._check_copies(kind, name, report)
        return report

    def _is_readable(self, kind: str, name: str) -> bool:
        return not any(
            stored.extent.file in self._unreadable for stored in self._sources[kind].stored_slices(kind, name)
        )

    def _check_elements(self, name: str, held: dict[str, LogicalTensor], report: ParameterReport) -> None:
        region = Region.whole(name, next(iter(held.values())).shape)
        tallies = {kind: ValueCounts() for kind in held}
        hashes = {
            kind: TensorHash(kind, name, tensor.dtype, tensor.shape)
            for kind, tensor in held.items()
            if self._digest_tensors
        }
        is_compared = {FP32_PARAM, WEIGHT} <= held.keys() and not self._are_one(name)
        master_check = check_at_stored_scales(self.checkpoint, [name], self.checkpoint.job.master_check, self._transfer)

        def targets(block: Slice) -> Iterator[tuple[Source, TargetSlice]]:
            for kind in held:
                yield self._sources[kind], target_slice(self._sources[kind], kind, block)

        for target in self._transfer.read_ahead(blocks((region,)), targets):
            values = {kind: self._read(kind, target) for kind in held}
            for kind, block in values.items():
                count_values(kind, block, tallies[kind])
                if kind in hashes:
                    hashes[kind].add(block)
                report.elements += block.numel()
                report.bytes_read += block.nbytes
            if is_compared:
                if (mismatch := master_check.first_mismatch(values[FP32_PARAM], values[WEIGHT])) is not None:
                    tally = tallies[FP32_PARAM]
                    tally.wrong += mismatch.count
                    report.wrong += mismatch.count
                    tally.first = tally.first or (target.start + mismatch.position, mismatch.master, mismatch.weight)
                report.compared += target.numel
            elif FP32_PARAM in values and WEIGHT in values:
                report.joined += target.numel
        report.digests += [hashed.digest for hashed in hashes.values()]
        for kind, tally in tallies.items():
            report.findings += _findings(kind, name, region.sizes, tally)

    def _are_one(self, name: str) -> bool:
        """Return whether a parameter's master and weight derive from each other, or are stored as one."""
        master, weight = (self._sources[kind].stored_slices(kind, name) for kind in (FP32_PARAM, WEIGHT))
        return self.checkpoint.optimizer.masters_are_derived(name) or list(master) == list(weight)

    def _read(self, kind: str, target: Slice) -> torch.Tensor:
        return read_slice(self._sources[kind], self._transfer, kind, target, allocate=self._memory.allocator(kind))

    def _check_copies(self, kind: str, name: str, report: ParameterReport) -> None:
        for copy in compared_copies(self.checkpoint, kind, name, self._transfer):
            report.copied += copy.elements
            if copy.different:
                elements = quantity(copy.different, "element")
                message = f"copy {copy.number} differs from the first in {elements} ({copy.places})"
                severity = warning if is_left_by_offload(self.checkpoint, kind, name) else error
                report.findings.append(severity(COPIES, f"{kind} {name}", message))

    def _check_shifted(
        self, optimizer: OptimizerState, name: str, held: dict[str, LogicalTensor], report: ParameterReport
    ) -> Iterator[Finding]:
        """Compare the slot of a parameter, as Megatron wrote it, with the true places of its elements."""
        shapes = {kind: tensor.shape for kind, tensor in held.items() if kind != WEIGHT}
        wrong = {
            kind: sum(self._wrong_in_slot(optimizer, kind, target) for target in blocks((Region.whole(name, shape),)))
            for kind, shape in shapes.items()
        }
        if FP32_PARAM in shapes:
            report.compared += prod(shapes[FP32_PARAM])
            report.wrong += wrong[FP32_PARAM]
        if any(wrong.values()):
            lost = sum(last - first for kind in wrong for first, last in optimizer.lost_intervals(kind, name)) // len(
                wrong
            )
            counts = ", ".join(f"{count:,} of {kind}" for kind, count in wrong.items())
            message = (
                f"Megatron 0.15 to 0.19 wrote it shifted; elements that are not its own: {counts}; of each "
                f"{prod(next(iter(shapes.values()))):,}, {lost:,} are lost, and this package recovers the others"
            )
            yield error(MASTERS, name, message)

    def _wrong_in_slot(self, optimizer: OptimizerState, kind: str, target: Slice) -> int:
        """Return the number of elements in a slot that are not its parameter's; lost elements count, too."""
        in_slots = replace(
            SourceView.of(optimizer),
            stored_slices=optimizer.slots,
            stored_slices_in=lambda kind, region: optimizer.slots(kind, region.name),
        )
        slot = bits_of(read_slice(in_slots, self._transfer, kind, target))
        true_bits = bits_of(read_slice(self._sources[kind], self._transfer, kind, target, accept_lost=True))
        different = slot != true_bits
        (region,) = target.regions
        for first, last in optimizer.lost_intervals(kind, region.name):
            different[max(0, first - target.start) : max(0, last - target.start)] = True
        return int(different.sum())


def content_bytes(checkpoint: CheckpointView) -> int:
    """Return the bytes of all weights, plus an estimate for the optimizer's state."""
    tensors = [checkpoint.logical_tensor(WEIGHT, name) for name in checkpoint.names(WEIGHT)]
    weights = sum(prod(tensor.shape) * ITEM_SIZE[tensor.dtype] for tensor in tensors if tensor is not None)
    numel = sum(prod(tensor.shape) for tensor in tensors if tensor is not None)
    return weights + (numel * 12 if checkpoint.optimizer.format() else 0)


def check_parameters(
    content: ContentCheck, workers: Workers, advance: Callable[[int], None], results: Results
) -> list[TensorDigest]:
    """Check the elements of all parameters.

    Args:
        content: checks one parameter.
        workers: the threads that share the parameters.
        advance: called with the number of bytes that were read.
        results: receives findings and checks.

    Returns:
        The SHA-256 of each tensor, if requested.
    """

    def check(name: str) -> ParameterReport:
        try:
            report = content.check(name)
        except ContentError as problem:
            report = ParameterReport([error(MASTERS, name, str(problem))])
        advance(report.bytes_read)
        return report

    def size(name: str) -> int:
        tensor = content.checkpoint.logical_tensor(WEIGHT, name)
        return 1 if tensor is None else prod(tensor.shape)

    reports = workers.map(check, content.names(), size)
    results.findings.extend(finding for report in reports for finding in report.findings)
    results.checks.extend(_comparison_checks(content.checkpoint, reports))
    return [digest for report in reports for digest in report.digests]


def _comparison_checks(checkpoint: CheckpointView, reports: Sequence[ParameterReport]) -> Iterator[Check]:
    """Yield what was compared of all parameters, and how many elements."""
    compared, wrong, joined = (
        sum(getattr(report, field) for report in reports) for field in ("compared", "wrong", "joined")
    )
    if not compared and not joined:
        yield Check(MASTERS, "no master was compared with its weight", done=False)
    if compared:
        how = "" if checkpoint.job.master_check is BY_ROUNDING else f", {checkpoint.job.master_check.relation}"
        equal = quantity(compared, "master equal to its weight", "masters equal to their weights")
        among = f"{compared - wrong:,} of " if wrong else ""
        yield Check(MASTERS, f"{among}{equal}{how}")
    if joined:
        state = checkpoint.optimizer.state()
        origin = "joined from weights and remainders" if PARAM_REMAINDER in state.kinds else "that are fp32 weights"
        message = f"{quantity(joined, 'master')} {origin}, placed by {' and '.join(state.order_sources())}"
        if checkpoint.optimizer.weights_derived_from_masters:
            message = f"{quantity(joined, 'master')}, stored in place of the weights, which are their roundings"
        yield Check(MASTERS, message)
    if copied := sum(report.copied for report in reports):
        yield Check(COPIES, f"{quantity(copied, 'element')} of tied or replicated copies")
    yield Check(VALUES, quantity(sum(report.elements for report in reports), "element"))


def count_values(kind: str, block: torch.Tensor, tally: ValueCounts) -> None:
    """Count the values of a block that no training produces; for second moments also negative ones."""
    if not block.is_floating_point():
        return
    values = block.float() if block.element_size() == 1 else block
    # A sum is finite only if all of its numbers are, and takes a thirtieth of the time. The sum of large numbers may be
    # infinite, too: then check each number.
    if not isfinite(float(values.sum())) and not bool(torch.isfinite(values).all()):
        tally.nan += int(torch.isnan(values).sum())
        tally.infinite += int(torch.isinf(values).sum())
    if kind == EXP_AVG_SQ and values.numel() and not float(values.amin()) >= 0:
        tally.negative += int((values < 0).sum())


def _findings(kind: str, name: str, shape: tuple[int, ...], tally: ValueCounts) -> Iterator[Finding]:
    where = f"{kind} {name}"
    if tally.first is not None:
        position, master, weight = tally.first
        wrong = quantity(tally.wrong, "master does not round to its weight", "masters do not round to their weights")
        message = f"{wrong}; the first is {master!r} for the weight {weight!r}"
        yield error(MASTERS, where, f"{message}, at {index_of(position, shape)}")
    yield from odd_values(where, tally)


def odd_values(where: str, tally: ValueCounts, file: str | None = None, offset: int | None = None) -> Iterator[Finding]:
    """Report values that no training produces; `file` and `offset`: the tensor's place, if it has one."""
    odd = [(tally.nan, "NaN"), (tally.infinite, "infinite"), (tally.negative, "negative")]
    if any(count for count, _ in odd):
        message = join_some(
            [f"{quantity(count, 'element is', 'elements are')} {adjective}" for count, adjective in odd if count]
        )
        yield warning(VALUES, where, message, file, offset)


def index_of(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element, given its position in row-major order."""
    return tuple(map(int, np.unravel_index(position, tuple(shape))))
