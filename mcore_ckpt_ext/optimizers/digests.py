"""Compares stored flat optimizer state with the digests that the sidecar recorded.

A remainder of a master matches any weight, so nothing else in a checkpoint reveals a misplaced one. A digest of each
parameter's state, recorded at the save, does: it depends on the values and their positions in the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from mcore_ckpt_ext.errors import ProofError, join_some
from mcore_ckpt_ext.layout.additive_digest import digest_tensor, format_digest, join_digests
from mcore_ckpt_ext.layout.buckets import BucketKey, OptimizerGroup, Packing, Placement, fit_problem
from mcore_ckpt_ext.layout.packing_proposals import Proposal
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice, numel_of
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers, GroupKey
from mcore_ckpt_ext.transfer import read_slice

_BLOCK = 1 << 22
# Number of elements to compare when choosing between packings, smallest parameters first to include many of them.
_ENOUGH = 1 << 20

PlacedParameter = tuple[OptimizerGroup, BucketKey, Placement]


def find_differences(
    buffers: Buffers, kinds: Collection[str] | None = None, share: tuple[int, int] = (0, 1)
) -> list[str]:
    """Describe where stored state differs from the saved state; empty if nothing was recorded.

    Args:
        buffers: the state.
        kinds: the kinds to compare; by default all recorded ones.
        share: the part of the work to do: its number, and the number of parts.
    """
    placed = [
        (group, key, placement)
        for group in buffers.groups.values()
        for key, placements in (buffers.packing_of(group).packing.items() if buffers.digests else ())
        for placement in placements
    ]
    part, parts = share
    return [problem for item in placed[part::parts] for problem in _problems(buffers, item, kinds)]


def contradicts(buffers: Buffers, group: OptimizerGroup, packing: Packing) -> str | None:
    """Return why samples of a candidate packing contradict the recorded digests; None if they do not."""
    for item in _smallest(group, packing):
        for problem in _problems(buffers, item, (PARAM_REMAINDER,)):
            return problem
    return None


def are_of_another_save(
    buffers: Buffers, recorded: Mapping[GroupKey, Mapping[str, Mapping[str, str]]], proposals: Sequence[Proposal]
) -> bool:
    """Return whether recorded digests of remainders belong to another save.

    They do if none matches, at any candidate position. Damage leaves some digests unchanged. Remainders that are all
    zero, for example of a weight that was never trained, have the same digest in every save, and are ignored. Samples
    of every group are read.
    """
    others = 0
    for (child, index), group in buffers.groups.items():
        of_group = recorded.get((child, index), {})
        packings = [packing for proposal in proposals if (packing := proposal.packing_of(group)) is not None]
        for placed in (_smallest(group, packing) for packing in packings if fit_problem(packing, group) is None):
            for item in placed:
                digest = of_group.get(item[2].name, {}).get(PARAM_REMAINDER)
                actual = None if digest is None else _stored_digest(buffers, item, PARAM_REMAINDER)
                zeros = torch.zeros(numel_of(item[2].regions), dtype=torch.int16)
                if actual is None or actual == format_digest(digest_tensor(zeros)):
                    continue
                if actual == digest:
                    return False
                others += 1
    return others > 1


def _smallest(group: OptimizerGroup, packing: Packing) -> Iterator[PlacedParameter]:
    """Yield the smallest parameters of a packing, up to the number of elements to compare."""
    placed = sorted(
        ((group, key, placement) for key, placements in packing.items() for placement in placements),
        key=lambda item: numel_of(item[2].regions),
    )
    compared = 0
    for item in placed:
        if compared and compared + numel_of(item[2].regions) > _ENOUGH:
            return
        compared += numel_of(item[2].regions)
        yield item


def check_digests(buffers: Buffers, where: str, share: tuple[int, int] = (0, 1)) -> None:
    """Refuse remainders that differ from the saved ones.

    Raises:
        ProofError: the remainders of some parameter differ.
    """
    problems = find_differences(buffers, (PARAM_REMAINDER,), share)
    if problems:
        raise ProofError(
            "remainders of masters have changed since they were saved",
            found=join_some(problems),
            expected="the digests that the sidecar recorded at the save",
            where=where,
            hint="the checkpoint is damaged, or its sidecar is that of another one: use another iteration",
        )


def _problems(buffers: Buffers, placed: PlacedParameter, kinds: Collection[str] | None) -> Iterator[str]:
    group, key, placement = placed
    recorded = buffers.digests.get((group.child, group.index))
    if recorded is None:
        return
    of_kinds = recorded.get(placement.name, {})
    for kind in of_kinds if kinds is None else kinds:
        if kind not in of_kinds and (key, kind) not in buffers.arrays[group.child, group.index]:
            continue  # the bucket's masters are of another kind
        if kind not in of_kinds:
            yield f"{kind} of {placement.name} in {group}: no digest of it was recorded"
        elif (actual := _stored_digest(buffers, placed, kind)) != of_kinds[kind]:
            yield (
                f"{kind} of {placement.name} at {placement.start} of {key}, {group}: digest {actual}, {of_kinds[kind]}"
            )


def _stored_digest(buffers: Buffers, placed: PlacedParameter, kind: str) -> str | None:
    group, key, placement = placed
    array = buffers.arrays[group.child, group.index].get((key, kind))
    if array is None:
        return None
    whole = (Region.whole(kind, (array.numel,)),)
    numel = numel_of(placement.regions)
    parts = []
    for begin in range(0, numel, _BLOCK):
        stop = min(begin + _BLOCK, numel)
        block = Slice(whole, placement.start + begin, placement.start + stop)
        parts.append(digest_tensor(read_slice(array, buffers.transfer, kind, block), begin))
    return format_digest(join_digests(*parts))
