"""Checks from the metadata that every element of every tensor is stored exactly once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import prod

from mcore_ckpt_ext.errors import UnreadableCheckpointError, quantity
from mcore_ckpt_ext.formats.grid import full_grid, known_grid
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import (
    EXP_AVG,
    EXP_AVG_SQ,
    FP32_PARAM,
    WEIGHT,
    LogicalTensor,
    contradicts_kind,
)
from mcore_ckpt_ext.operations.findings import COVERED, Finding, error, warning
from mcore_ckpt_ext.optimizers.flat_arrays import MASTERS, Buffers, FlatArray
from mcore_ckpt_ext.optimizers.groups import LION, rule_of
from mcore_ckpt_ext.planning.overlap import Piece, overlap
from mcore_ckpt_ext.planning.plan import Copies

_MOMENTS = frozenset({EXP_AVG, EXP_AVG_SQ})
_OF_ADAM = _MOMENTS | {FP32_PARAM}


def check_tensor(tensor: LogicalTensor, kind: str, parts: Copies) -> Iterator[Finding]:
    """Check that each copy is complete, and that the first copies of all parts cover each element once."""
    if _is_grid(tensor, parts):
        return
    where = f"{kind} {tensor.name}"
    for slices in (copy for copies in parts for copy in copies):
        for stored in slices:
            if not all(_inside(region, tensor.shape) for region in stored.slice.regions):
                yield error(COVERED, where, f"a part lies outside of its shape {tensor.shape}: {stored.slice.regions}")
                return
    first = [stored for copies in parts for stored in copies[0]]
    numels = [[sum(stored.slice.numel for stored in copy) for copy in copies] for copies in parts]
    if any(len(set(of_part)) > 1 for of_part in numels):
        yield error(COVERED, where, f"its copies hold different numbers of elements: {numels}")
    pieces = [Piece(region, low, high, 0) for stored in first for region, low, high, _ in stored.slice.pieces()]
    whole = Region.whole(tensor.name, tensor.shape)
    missing = overlap(tensor.shape, Piece(whole, 0, whole.numel, 0), pieces).missing
    absent = sum(high - low for low, high in missing)
    if absent:
        yield error(COVERED, where, f"{_nowhere(absent, whole.numel)}; the first is {missing[0][0]}")
    twice = sum(stored.slice.numel for stored in first) + absent - whole.numel
    if twice:
        yield error(COVERED, where, f"{quantity(twice, 'element is', 'elements are')} stored more than once")


def _is_grid(tensor: LogicalTensor, parts: Copies) -> bool:
    """Return True if the only copy's parts are the cells of a grid, each once, as for most tensors."""
    match parts:
        case [[[only]]] if only.slice == Slice.whole((Region.whole(tensor.name, tensor.shape),)):
            return True
        case [[[_, *_] as copy]]:
            regions = [stored.slice.regions[0] for stored in copy if len(stored.slice.regions) == 1]
        case _:
            return False
    whole = all(stored.slice == Slice.whole(stored.slice.regions) for stored in copy)
    if not whole or len(regions) < len(copy) or any(len(region.sizes) != len(tensor.shape) for region in regions):
        return False
    offsets = zip(*(region.offsets for region in regions), strict=True)
    sizes = zip(*(region.sizes for region in regions), strict=True)
    return full_grid(tensor.shape, list(zip(offsets, sizes, strict=True))) is not None


def _inside(region: Region, shape: tuple[int, ...]) -> bool:
    limits = zip(region.offsets, region.sizes, shape, strict=False)
    return len(region.sizes) == len(shape) and all(low >= 0 and low + size <= end for low, size, end in limits)


def check_kind(checkpoint: CheckpointView, kind: str) -> Iterator[Finding]:
    """Check all tensors of a kind."""
    contradicted = _other_precision(checkpoint.job.arguments()) if kind == WEIGHT else None
    for name in checkpoint.names(kind):
        tensor = checkpoint.logical_tensor(kind, name)
        if tensor is None:
            yield error(COVERED, f"{kind} {name}", "it is missing")
            continue
        if tensor.dtype == contradicted:
            yield error(COVERED, f"{kind} {name}", f"it is stored as {tensor.dtype}, which the job does not train in")
        if kind != WEIGHT or known_grid(checkpoint.model.weights(), name) is None:
            yield from check_tensor(tensor, kind, checkpoint.copies(kind, name))


def _other_precision(job: JobArguments) -> str | None:
    """Return the half precision in which a job stores no weight; None if that is unknown.

    Megatron casts the whole model to one of them (`Float16Module`, megatron/core/transformer/module.py, core_v0.7.0 to
    0.19.2).
    """
    if not job.is_complete or bool(job.bf16) == bool(job.fp16):
        return None
    return "float16" if job.bf16 else "bfloat16"


def check_arrays(buffers: Buffers) -> Iterator[Finding]:
    """Check the flat arrays themselves, without their packing."""
    for (child, index), arrays in buffers.arrays.items():
        of_group = {kind for _, kind in arrays}
        for bucket in dict.fromkeys(bucket for bucket, _ in arrays):
            # Weights of another dtype may have masters of another kind.
            has_masters = any((bucket, kind) in arrays for kind in MASTERS)
            lacking = {kind for kind in of_group if (bucket, kind) not in arrays}
            if lacking := lacking.difference(MASTERS if has_masters else ()):
                where = f"optimizer {child}, dp_group_idx_{index}.{bucket}"
                yield error(COVERED, where, f"its {_list_kinds(lacking)} is missing, which other buckets have")
        for (bucket, kind), array in arrays.items():
            yield from check_flat(f"{kind} of optimizer {child}, dp_group_idx_{index}.{bucket}", array)


def check_flat(where: str, array: FlatArray) -> Iterator[Finding]:
    """Check the pieces of one flat array."""
    if array.is_contiguous:
        return
    end = 0
    missing = 0
    twice = 0
    for start, stop in sorted(zip(array.starts, array.stops, strict=True)):
        missing += max(0, start - end)
        twice += max(0, min(end, stop) - start)
        end = max(end, stop)
    missing += max(0, array.numel - end)
    if missing:
        yield error(COVERED, where, _nowhere(missing, array.numel))
    if twice:
        yield error(COVERED, where, f"{quantity(twice, 'element is', 'elements are')} stored more than once")


def check_state(checkpoint: CheckpointView) -> Iterator[Finding]:
    """Check the optimizer's state by name; its packing must be known."""
    optimizer = checkpoint.optimizer.state()
    for kind in optimizer.kinds:
        yield from check_kind(checkpoint, kind)
    for buffers in optimizer.buffers:
        yield from check_groups(buffers)
    yield from check_parameters_with_state(checkpoint)
    without = sorted(set(checkpoint.job.models().weights) - set(optimizer.names()))
    for name in without:
        yield warning(COVERED, name, "it has a weight and no optimizer state: it was frozen, or its state is missing")


def check_parameters_with_state(checkpoint: CheckpointView) -> Iterator[Finding]:
    """Check that parameters with optimizer state are the model's, with all kinds of their update rule.

    The other parameters and the parameter groups show which kinds belong together.
    """
    optimizer = checkpoint.optimizer.state()
    weights = set(checkpoint.names(WEIGHT))
    kinds_of: dict[str, frozenset[str]] = {}
    for kind in optimizer.carried_kinds:
        for name in optimizer.names(kind):
            kinds_of[name] = kinds_of.get(name, frozenset()) | {kind}
    has_lion = any(rule_of(group) == LION for group in checkpoint.optimizer.param_groups())
    all_kept = set(kinds_of.values()) if not has_lion else set()
    for name, kept in kinds_of.items():
        yield from _check_dtypes(checkpoint, name, kept)
        if weights and name not in weights:
            yield error(COVERED, name, f"it has {_list_kinds(kept)}, but no weight: the model has no such parameter")
        lacking = sorted((more - kept for more in all_kept if kept < more), key=sorted)
        is_adams = kept <= _OF_ADAM and (EXP_AVG_SQ in kept or (EXP_AVG in kept and not has_lion))
        if not lacking and is_adams:
            lacking = [_MOMENTS - kept]
        if any(lacking) and not _needs_no_master(checkpoint, name, lacking[0]):
            kinds = " or ".join(map(_list_kinds, lacking))
            yield error(COVERED, name, f"it has {_list_kinds(kept)}, but no {kinds}")


def _check_dtypes(checkpoint: CheckpointView, name: str, kinds: Collection[str]) -> Iterator[Finding]:
    """Check that a parameter that is trained, and its state, have dtypes of training.

    Formats without checksums, such as zarr, have nothing else that contradicts a wrong dtype of the same size.
    """
    for kind in sorted({WEIGHT, *kinds}):
        tensor = checkpoint.logical_tensor(kind, name)
        if tensor is not None and contradicts_kind(kind, tensor.dtype):
            yield error(COVERED, f"{kind} {name}", f"it is stored as {tensor.dtype}, which no training writes")


def _needs_no_master(checkpoint: CheckpointView, name: str, lacking: Collection[str]) -> bool:
    """Return True if only the master is missing, of a parameter that is itself trained in fp32."""
    weight = checkpoint.logical_tensor(WEIGHT, name)
    return set(lacking) == {FP32_PARAM} and weight is not None and weight.dtype == "float32"


def _list_kinds(kinds: Collection[str]) -> str:
    return " and ".join(sorted(kinds))


def check_stored_once(checkpoint: CheckpointView, kinds: Iterable[str]) -> Iterator[Finding]:
    """Check that no element is stored more than once: it is unknown which of the values counts."""
    for kind in kinds:
        for name in checkpoint.names(kind):
            tensor = checkpoint.logical_tensor(kind, name)
            parts = checkpoint.copies(kind, name)
            first = sum(stored.slice.numel for copies in parts for stored in copies[0])
            if tensor is not None and first > prod(tensor.shape):
                yield from check_tensor(tensor, kind, parts)


def raise_first_contradiction(checkpoint: CheckpointView, findings: Iterable[Finding]) -> None:
    """Refuse a checkpoint that has findings.

    Raises:
        UnreadableCheckpointError: the error describes the first finding.
    """
    finding = next(iter(findings), None)
    if finding is not None:
        raise UnreadableCheckpointError(
            "the checkpoint contradicts itself",
            found=finding.what,
            where=f"{finding.where}, {checkpoint.files.folder}",
            hint="use another iteration: this one is damaged, or mixes several checkpoints; to list every "
            "contradiction: mcore-ckpt verify PATH",
        )


def check_groups(buffers: Buffers) -> Iterator[Finding]:
    """Check that each rank that held a parameter has stored a group."""
    for place, names in lost_parameters(buffers).items():
        message = f"its optimizer state is missing; it had {quantity(len(names), 'parameter')}, the first is {names[0]}"
        yield error(COVERED, place, message)


def lost_parameters(buffers: Buffers) -> dict[str, list[str]]:
    """Return the parameters of the ranks that held some and have stored no group, by rank."""
    present = {group.rank for group in buffers.groups.values()}
    absent: dict[str, list[str]] = {}
    for name in buffers.models.weights:
        for rank in buffers.models.ranks_of(name):
            if rank not in present:
                absent.setdefault(str(rank), []).append(name)
    return absent


def _nowhere(missing: int, numel: int) -> str:
    elements = f"of {quantity(numel, 'element')}"
    return f"{quantity(missing, f'{elements} is', f'{elements} are')} not stored anywhere"
