"""Ranks agree on errors, so that one rank's refusal is the refusal of all and nobody waits in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt_ext.errors import ResumeRefusedError

Result = TypeVar("Result")
_SHOWN = 4


def gather(item: Result) -> list[Result]:
    """One item from every rank, in rank order."""
    if not dist.is_initialized():
        return [item]
    items: list[Result | None] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items  # type: ignore[return-value]  # every entry has been replaced


def agreed(phase: str, work: Callable[[], Result], consequence: str = "the optimizer is untouched") -> list[Result]:
    """Do `work` on every rank; its results from all ranks, or the same refusal on all.

    Args:
        phase: what is being done, for the message.
        work: must not communicate.
        consequence: in which state a refusal leaves the job.

    Raises:
        ResumeRefusedError: some rank's work raised; the message holds the reasons.
    """
    result: Result | None = None
    cause: Exception | CheckpointException | None = None
    try:
        result = work()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - the latter is no Exception
        cause = error
    outcomes = gather((result, None if cause is None else f"{type(cause).__name__}: {cause}"))
    refused = {rank: reason for rank, (_, reason) in enumerate(outcomes) if reason is not None}
    if refused:
        raise ResumeRefusedError(_summary(f"{phase}; {consequence}", refused)) from cause
    return [found for found, _ in outcomes]  # type: ignore[misc]  # no rank raised: all results are there


def told_to_all(reason: str | None) -> str | None:
    """What went wrong on some rank, with the ranks, on every rank; None where nothing did.

    One number is exchanged as long as all is well, so that a running job can ask often.
    """
    if not dist.is_initialized():
        return reason
    flag = torch.tensor([int(reason is not None)], dtype=torch.int, device=_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return reasons_of_all(reason) if flag.item() else None


def reasons_of_all(reason: str | None) -> str:
    """The reasons of the ranks that have one, on every rank."""
    given = {rank: text for rank, text in enumerate(gather(reason)) if text is not None}
    return _listed({rank: text for rank, text in given.items() if text} or given)


def _device() -> torch.device:
    """Where a collective of the default group wants its tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _summary(head: str, refused: dict[int, str]) -> str:
    """The distinct reasons, each with the ranks that gave it, under what was being done."""
    return f"mcore_ckpt_ext refused while {head}\n  {_listed(refused)}"


def _listed(reasons: dict[int, str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, reason in reasons.items():
        ranks_of.setdefault(reason, []).append(rank)
    lines = [f"rank {', '.join(map(str, ranks))}: {reason}" for reason, ranks in ranks_of.items()]
    more = f"\n  and {len(lines) - _SHOWN} more reasons" if len(lines) > _SHOWN else ""
    return "\n  ".join(lines[:_SHOWN]) + more
