"""Recovers a group's packing: a proposal must fit its sizes, and is confirmed by its content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mcore_ckpt_ext.errors import PackingError, UnsupportedCheckpointError, join_some
from mcore_ckpt_ext.layout.buckets import (
    SAMPLE,
    BucketKey,
    OptimizerGroup,
    Packing,
    Placement,
    SampleReader,
    fit_problem,
)
from mcore_ckpt_ext.layout.grad_buffer import align, bucket_alignment
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING, MasterCheck
from mcore_ckpt_ext.layout.packing_proposals import Proposal, buffer_ranks
from mcore_ckpt_ext.layout.packing_search import search_by_content
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import numel_of

_AT_ONCE = 32
"""Number of parameters whose samples are compared together."""
_INCOMPLETE = "it does not cover every parameter"
_UNKNOWN_PARAMETERS = (
    "this package does not know how the model stores some parameters, or the checkpoint is damaged: resume under the "
    "layout that wrote it and save with --dist-ckpt-optim-fully-reshardable, which stores each parameter separately"
)


class UncertainPackingError(PackingError, UnsupportedCheckpointError):
    """The checkpoint appears intact, but nothing in it determines the positions of parameters."""


@dataclass(frozen=True)
class RecoveredPacking:
    """A packing that fits sizes and chunk borders, and the source of its parameter order.

    Attributes:
        order_source: the label of the source.
        packing: the positions of parameters.
        discovered: whether it was found by content alone.
        sidecar_problem: why the sidecar's packing was rejected; None if it was not, or there is none.
    """

    order_source: str
    packing: Packing
    discovered: bool = False
    sidecar_problem: str | None = None


def recover_packing(
    group: OptimizerGroup,
    models: LocalModels,
    proposals: Sequence[Proposal],
    reader: SampleReader,
) -> RecoveredPacking:
    """Find the packing of one optimizer group.

    Samples of every parameter confirm the choice here; the master check of all elements follows when they are read. It
    cannot detect that a sidecar swaps parameters with equal weights, so a known layer spec that fits overrules the
    sidecar.

    Raises:
        PackingError: no proposal passes, and the search by content fails.
    """
    tried: dict[str, list[str]] = {}
    sidecar_problem: str | None = None
    for number, proposal in enumerate(proposals):
        packing = _packing_or_problem(group, proposal, reader)
        if proposal.is_recorded and not isinstance(packing, str):
            packing = _contradiction(group, models, packing, proposals[number + 1 :], reader) or packing
        if not isinstance(packing, str):
            return RecoveredPacking(proposal.label, packing, sidecar_problem=sidecar_problem)
        tried.setdefault(packing, []).append(proposal.label)
        sidecar_problem = packing if proposal.is_recorded else sidecar_problem
    try:
        by_content = search_by_content(
            group, models.candidates(group.rank), _data_parallel_borders(group, models), reader
        )
    except PackingError as error:
        is_unknown = tried.keys() == {_INCOMPLETE}
        problems = [f"{', '.join(dict.fromkeys(labels))}: {problem}" for problem, labels in tried.items()]
        raise PackingError(
            "no packing of the gradient buffers could be verified",
            found="; ".join([*problems, f"by content: {error.message if is_unknown else error}"]),
            where=str(group),
            hint=_UNKNOWN_PARAMETERS if is_unknown else None,
        ) from error
    return RecoveredPacking("discovery by content", by_content, discovered=True, sidecar_problem=sidecar_problem)


def _packing_or_problem(group: OptimizerGroup, proposal: Proposal, reader: SampleReader | None = None) -> Packing | str:
    """Return a proposed packing, or why sizes, chunk borders or, with a reader, samples contradict it."""
    packing = proposal.packing_of(group)
    if packing is None:
        return _INCOMPLETE
    problem = fit_problem(packing, group)
    if problem is None and reader is not None:
        problem = _sample_mismatch(group, packing, reader)
    return problem or packing


def _contradiction(
    group: OptimizerGroup,
    models: LocalModels,
    recorded: Packing,
    others: Sequence[Proposal],
    reader: SampleReader,
) -> str | None:
    """Return a known layer spec that also fits but contradicts the sidecar; None if there is none.

    A model's observed order, or any known spec, may confirm the sidecar. No known spec covers a user's own modules.
    """
    positions = _positions(recorded)
    packings = (packing for other in others if (packing := other.packing_of(group)) is not None)
    if models.arguments.spec or any(_positions(packing) == positions for packing in packings):
        return None
    for other in (other for other in others if not other.is_observed):
        fitting = _packing_or_problem(group, other, reader)
        if not isinstance(fitting, str):
            moved = {name for key, places in _positions(fitting).items() for name, _ in {*places} ^ {*positions[key]}}
            return f"{other.label} fits by itself and places parameters differently: {join_some(sorted(moved))}"
    return None


def recover_unverified_packing(
    group: OptimizerGroup,
    models: LocalModels,
    proposals: Sequence[Proposal],
    contradiction: Callable[[Packing], str | None] = lambda packing: None,
    *,
    is_recorded: bool = False,
) -> RecoveredPacking:
    """Find the packing of a group whose masters cannot verify it.

    Remainders match any weight, and masters that no step updated match none. The packing must be certain for another
    reason. Recorded digests confirm it; or it was recorded or observed in a model, and fits the borders of the stored
    chunks; or it is the only known one that fits these borders, for a model that Megatron itself builds.

    Args:
        group: the group.
        models: the parameters that may be in it.
        proposals: the most reliable first.
        contradiction: returns why a packing contradicts digests recorded at the save; None if it does not.
        is_recorded: whether there are such digests.

    Raises:
        PackingError: the recorded digests match no packing.
        UncertainPackingError: the packing is not certain.
    """
    fitting: list[tuple[Proposal, Packing]] = []
    tried: list[str] = []
    for proposal in proposals:
        packing = _packing_or_problem(group, proposal)
        if not isinstance(packing, str):
            packing = contradiction(packing) or packing
        if isinstance(packing, str):
            tried.append(f"{proposal.label}: {packing}")
            continue
        if proposal.is_observed or is_recorded:
            return RecoveredPacking(proposal.label, packing)
        fitting.append((proposal, packing))
        tried.append(f"{proposal.label}: it fits")
    own_spec = bool(models.arguments.spec)  # `--spec`: the user's own modules
    has_borders = all(stored.borders is not None for stored in group.buckets.values())
    are_alike = all(_positions(packing) == _positions(fitting[0][1]) for _, packing in fitting)
    if fitting and has_borders and are_alike and not own_spec:
        return RecoveredPacking(fitting[0][0].label, fitting[0][1])
    refusal = PackingError if is_recorded else UncertainPackingError
    raise refusal(
        "the places of the parameters are not certain, and there are no masters that could verify them",
        found="; ".join(tried),
        expected="a sidecar, or chunk borders that leave one known order of parameters",
        where=str(group),
        hint=f"the checkpoint is damaged: use another iteration; or its {SIDECAR_FILE} is of an earlier save, and "
        "a job without this package has written the iteration again: then delete that file"
        if is_recorded
        else "resume under the layout that wrote it, with this package installed, and save: the sidecar records it",
    )


def _positions(packing: Packing) -> dict[BucketKey, list[tuple[str, int]]]:
    return {key: [(placement.name, placement.start) for placement in bucket] for key, bucket in packing.items()}


def propose_packing(group: OptimizerGroup, proposals: Sequence[Proposal]) -> RecoveredPacking | None:
    """Return the first proposal that fits a group's sizes and chunk borders; content is not checked."""
    for proposal in proposals:
        packing = _packing_or_problem(group, proposal)
        if not isinstance(packing, str):
            return RecoveredPacking(proposal.label, packing)
    return None


def _sample_mismatch(group: OptimizerGroup, packing: Packing, reader: SampleReader) -> str | None:
    """Compare the first elements of every parameter with its weight, and describe the first difference."""
    placed = [(key, placement) for key, placements in packing.items() for placement in placements]
    # The first parameter is compared alone, because it reveals most errors before more is read.
    for begin, end in pairwise((0, *range(1, len(placed), _AT_ONCE), len(placed))):
        together = reader.read_ahead(group, placed[begin:end])
        samples = [_Sample.read(group, key, placement, reader) for key, placement in together]
        if samples and not _all_match(samples):
            for sample in samples:
                if (mismatch := sample.master_check.first_mismatch(sample.master, sample.weight)) is not None:
                    return f"{sample.name} would be {mismatch}"
    return None


class _Sample(NamedTuple):
    """The first masters of a parameter at the position in a packing, and its first weights."""

    name: str
    master_check: MasterCheck
    master: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def read(cls, group: OptimizerGroup, key: BucketKey, placement: Placement, reader: SampleReader) -> _Sample:
        count = min(SAMPLE, numel_of(placement.regions))
        master = reader.master(group, key, placement.start, count)
        master_check = reader.master_check(region.name for region in placement.regions)
        return cls(placement.name, master_check, master, reader.weight(placement.regions, count))


def _all_match(samples: Sequence[_Sample]) -> bool:
    """Return whether all masters round to their weights, comparing them together to save overhead."""
    _, _, masters, weights = zip(*samples, strict=True)
    if len({weight.dtype for weight in weights}) > 1:
        return False
    return BY_ROUNDING.first_mismatch(torch.cat(masters), torch.cat(weights)) is None


def _data_parallel_borders(group: OptimizerGroup, models: LocalModels) -> dict[BucketKey, frozenset[int]]:
    """Return the borders of each bucket from its even division between the data-parallel ranks."""
    ranks = buffer_ranks(models, group.rank)
    high_bandwidth = bool(models.arguments.ddp_pad_buckets_for_high_nccl_busbw)
    alignment = bucket_alignment(ranks, high_bandwidth)
    borders: dict[BucketKey, frozenset[int]] = {}
    for key, stored in group.buckets.items():
        padded = align(stored.numel_unpadded, alignment)
        borders[key] = frozenset(padded // ranks * rank for rank in range(1, ranks))
    return borders
