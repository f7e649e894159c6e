"""Recovers a group's packing: candidates are restricted by sizes and confirmed by content.

They come from several sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mcore_ckpt_ext.errors import PackingError, UnsupportedCheckpointError, join_some
from mcore_ckpt_ext.layout.buckets import BucketKey, Bytes, OptimizerGroup, Packing, Placement, mismatch_reason
from mcore_ckpt_ext.layout.grad_buffer import bucket_alignment
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING, MasterCheck
from mcore_ckpt_ext.layout.packing_candidates import Proposal, buffer_ranks
from mcore_ckpt_ext.layout.packing_search import discover
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import numel_of

# Number of elements of a parameter that are compared, and number of parameters that are compared together.
_SAMPLE = 64
_AT_ONCE = 32
_INCOMPLETE = "it does not cover every parameter"
_UNKNOWN_PARAMETERS = (
    "this package does not know how the model stores some parameters, or the checkpoint is damaged: resume under the "
    "layout that wrote it and save with --dist-ckpt-optim-fully-reshardable, which stores each parameter separately"
)


class UncertainPackingError(PackingError, UnsupportedCheckpointError):
    """The checkpoint appears intact, but nothing in it determines the positions of parameters."""


@dataclass(frozen=True)
class RecoveredPacking:
    """A packing confirmed by sizes, chunk borders and content, and the source of its parameter order.

    Samples of the content are compared.

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


def recover(
    group: OptimizerGroup,
    models: LocalModels,
    proposals: Sequence[Proposal],
    read: Bytes,
) -> RecoveredPacking:
    """Find the packing of one optimizer group.

    Samples of every parameter confirm the choice here; the master check of all elements follows when they are read. It
    cannot detect that a sidecar swaps parameters with equal weights, so a known layer spec that fits overrules the
    sidecar.

    Raises:
        PackingError: no candidate passes, and the search by content fails.
    """
    tried: dict[str, list[str]] = {}
    sidecar_problem: str | None = None
    for number, proposal in enumerate(proposals):
        packing, problem = _tried(group, proposal, read)
        if packing is not None and problem is None and proposal.is_recorded:
            problem = _contradiction(group, models, packing, proposals[number + 1 :], read)
        if packing is not None and problem is None:
            return RecoveredPacking(proposal.label, packing, sidecar_problem=sidecar_problem)
        tried.setdefault(str(problem), []).append(proposal.label)
        sidecar_problem = problem if proposal.is_recorded else sidecar_problem
    try:
        by_content = discover(group, models.candidates(group.rank), _data_parallel_borders(group, models), read)
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


def _tried(group: OptimizerGroup, proposal: Proposal, read: Bytes) -> tuple[Packing | None, str | None]:
    """Return a candidate packing, and why it cannot be the group's.

    Sizes, chunk borders and samples of the content are compared.
    """
    packing = proposal.packing_of(group)
    problem = _INCOMPLETE if packing is None else mismatch_reason(packing, group)
    if packing is not None and problem is None:
        problem = _sample(group, packing, read)
    return packing, problem


def _contradiction(
    group: OptimizerGroup,
    models: LocalModels,
    recorded: Packing,
    others: Sequence[Proposal],
    read: Bytes,
) -> str | None:
    """Return a known layer spec that also fits but contradicts the sidecar; None if there is none.

    A model's observed order, or any known spec, may confirm the sidecar. No known spec covers a user's own modules.
    """
    placed = _placed(recorded)
    packings = (packing for other in others if (packing := other.packing_of(group)) is not None)
    if models.arguments.spec or any(_placed(packing) == placed for packing in packings):
        return None
    for other in others:
        packing, problem = (None, None) if other.is_observed else _tried(group, other, read)
        if packing is not None and problem is None:
            moved = {name for key, places in _placed(packing).items() for name, _ in {*places} ^ {*placed[key]}}
            return f"{other.label} fits by itself and places parameters differently: {join_some(sorted(moved))}"
    return None


def recover_unproven(
    group: OptimizerGroup,
    models: LocalModels,
    proposals: Sequence[Proposal],
    contradiction: Callable[[Packing], str | None] = lambda packing: None,
    *,
    is_recorded: bool = False,
) -> RecoveredPacking:
    """Find the packing of a group whose content cannot verify it.

    The content cannot, because any weight matches any remainder. The packing must be certain for another reason.
    Recorded digests confirm it; or it was recorded or observed in a model, and fits the borders of the stored chunks;
    or it is the only known one that fits these borders, for a model that Megatron itself builds.

    Args:
        group: the group.
        models: the parameters that may be in it.
        proposals: candidate packings, the most reliable first.
        contradiction: returns why a packing contradicts digests recorded at the save; None if it does not.
        is_recorded: whether there are such digests.

    Raises:
        PackingError: the recorded digests match no packing.
        UncertainPackingError: the packing is not certain.
    """
    fitting: list[tuple[Proposal, Packing]] = []
    tried: list[str] = []
    for proposal in proposals:
        packing = proposal.packing_of(group)
        problem = _INCOMPLETE if packing is None else mismatch_reason(packing, group)
        if packing is not None and problem is None:
            problem = contradiction(packing)
        if packing is not None and problem is None:
            if proposal.is_observed or is_recorded:
                return RecoveredPacking(proposal.label, packing)
            fitting.append((proposal, packing))
        tried.append(f"{proposal.label}: {problem or 'it fits'}")
    own_spec = bool(models.arguments.spec)  # `--spec`: the user's own modules
    bordered = all(stored.cuts is not None for stored in group.buckets.values()) and not own_spec
    alike = all(_placed(packing) == _placed(fitting[0][1]) for _, packing in fitting)
    if fitting and bordered and alike:
        return RecoveredPacking(fitting[0][0].label, fitting[0][1])
    refusal = PackingError if is_recorded else UncertainPackingError
    raise refusal(
        "the places of the parameters are not certain, and remainders of masters, unlike masters, cannot verify them",
        found="; ".join(tried),
        expected="a sidecar, or chunk borders that leave one known order of parameters",
        where=str(group),
        hint=f"the checkpoint is damaged: use another iteration; or its {SIDECAR_FILE} is of an earlier save, and "
        "a job without this package has written the iteration again: then delete that file"
        if is_recorded
        else "resume under the layout that wrote it, with this package installed, and save: the sidecar records it",
    )


def _placed(packing: Packing) -> dict[BucketKey, list[tuple[str, int]]]:
    return {key: [(placement.name, placement.start) for placement in placed] for key, placed in packing.items()}


def propose(group: OptimizerGroup, proposals: Sequence[Proposal]) -> RecoveredPacking | None:
    """Return the first candidate that fits a group's sizes and chunk borders; content is not checked."""
    for proposal in proposals:
        packing = proposal.packing_of(group)
        if packing is not None and mismatch_reason(packing, group) is None:
            return RecoveredPacking(proposal.label, packing)
    return None


def _sample(group: OptimizerGroup, packing: Packing, read: Bytes) -> str | None:
    """Compare the first elements of every parameter with its weight, and describe the first difference."""
    placed = [(key, placement) for key, placements in packing.items() for placement in placements]
    # The first parameter is compared alone, because it reveals most errors before more is read.
    for begin, end in pairwise((0, *range(1, len(placed), _AT_ONCE), len(placed))):
        samples = [_Sample.of(group, key, placement, read) for key, placement in placed[begin:end]]
        if samples and not _all_round(samples):
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
    def of(cls, group: OptimizerGroup, key: BucketKey, placement: Placement, read: Bytes) -> _Sample:
        count = min(_SAMPLE, numel_of(placement.regions))
        master = read.master(group, key, placement.start, count)
        master_check = read.master_check(region.name for region in placement.regions)
        return cls(placement.name, master_check, master, read.weight(placement.regions, count))


def _all_round(samples: Sequence[_Sample]) -> bool:
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
        padded = -(-stored.numel_unpadded // alignment) * alignment
        borders[key] = frozenset(padded // ranks * rank for rank in range(1, ranks))
    return borders
