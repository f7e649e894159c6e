"""Ranks agree on errors, so that one rank's refusal is the refusal of all and nobody waits in a collective."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt_ext.errors import CheckpointError, ResumeRefusedError, format_error, format_ranks
from mcore_ckpt_ext.group_device import control_device
from mcore_ckpt_ext.storage.gc_pause import collector_paused

Result = TypeVar("Result")
_SHOWN = 4
_SIZE_BYTES, _SHORT_BYTES = 8, 56
# Of all ranks together; also what messages over a device take of its memory.
_LITTLE_BYTES = 1 << 20
# Items are few where at most one rank in so many has one of its own.
_FEW = 4
OPTIMIZER_UNCHANGED = "the optimizer is unchanged"
"""What a refused load has left as it was, for messages."""
Failure = CheckpointException
"""What torch and Megatron raise when some rank failed; it is no Exception."""


def rank_and_size() -> tuple[int, int]:
    """This rank, and how many there are; of a program without ranks, the only one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_first_rank() -> bool:
    """Whether this rank writes and speaks for all."""
    return rank_and_size()[0] == 0


def gather(item: Result) -> list[Result]:
    """One item from every rank, in rank order; items that several ranks have may be one object.

    Thousands of ranks have the same to tell, or little. So all learn what each has to tell where that is short, and the
    digests of the rest; where these are few, the first rank of each sends what is behind it, and otherwise all send
    theirs, at the size of the largest.
    """
    if not dist.is_initialized():
        return [item]
    data, ranks = pickle.dumps(item), dist.get_world_size()
    own = _mark(data)
    marks = [mark.tobytes() for mark in _all_gathered(own, ranks)]
    firsts: dict[bytes, int] = {}
    for rank, mark in enumerate(marks):
        firsts.setdefault(mark, rank)
    if len(firsts) == 1:
        return [item] * ranks
    # Ranks of this job made the pickles, as with torch's own collectives of objects.
    known: dict[bytes, Result] = {mark: pickle.loads(short) for mark in firsts if (short := _told_by(mark)) is not None}
    known[own] = item
    long = {mark: first for mark, first in firsts.items() if _told_by(mark) is None}
    if len(long) * _FEW > ranks:
        sizes = list(map(_size_in, marks))
        told = _all_gathered(data.ljust(max(sizes), b"\0"), ranks)
        return [pickle.loads(padded[:size]) for padded, size in zip(told, sizes, strict=True)]
    for mark, first in long.items():
        sent = _broadcast(data if mark == own else bytes(_size_in(mark)), first)
        if mark != own:
            known[mark] = pickle.loads(sent)
    return [known[mark] for mark in marks]


def highest_of_all(numbers: Sequence[int]) -> list[int]:
    """Return the highest of each number, over all ranks."""
    device = control_device()
    own = torch.tensor(numbers, dtype=torch.int64)
    found = own if device.type == "cpu" else _room(device)[: own.nbytes].view(torch.int64).copy_(own)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    highest: list[int] = found.tolist()
    return highest


@cache
def _room(device: torch.device) -> torch.Tensor:
    """Memory on a device through which messages go: with their own, a rank that has none left would keep all waiting.

    It is asked for when ranks first agree on something, before anything large is read.
    """
    return torch.empty(_LITTLE_BYTES, dtype=torch.uint8, device=device)


def _broadcast(data: bytes, first: int) -> bytes:
    """Return the bytes that one rank has for all; `data` is as long on each."""
    device = control_device()
    if device.type == "cpu":
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(sent, first)
        return sent.numpy().tobytes()
    blocks = []
    for start in range(0, len(data), _LITTLE_BYTES):
        part = bytearray(data[start : start + _LITTLE_BYTES])
        block = _room(device)[: len(part)].copy_(torch.frombuffer(part, dtype=torch.uint8))
        dist.broadcast(block, first)
        blocks.append(block.cpu().numpy().tobytes())
    return b"".join(blocks)


def _mark(data: bytes) -> bytes:
    """How long it is, and itself where it is short, or else its digest."""
    short = data if len(data) <= _SHORT_BYTES else hashlib.blake2b(data, digest_size=_SHORT_BYTES).digest()
    return len(data).to_bytes(_SIZE_BYTES, "little") + short.ljust(_SHORT_BYTES, b"\0")


def _size_in(mark: bytes) -> int:
    return int.from_bytes(mark[:_SIZE_BYTES], "little")


def _told_by(mark: bytes) -> bytes | None:
    """The bytes that a mark was made of, where they are short."""
    size = _size_in(mark)
    return mark[_SIZE_BYTES : _SIZE_BYTES + size] if size <= _SHORT_BYTES else None


def _all_gathered(data: bytes, ranks: int) -> NDArray[numpy.uint8]:
    """The bytes of every rank, of which all have as many: `[ranks, bytes]`.

    Gloo's `all_gather` hands them on from rank to rank. Where they are little, the first rank hears of all and tells
    all, which takes a fifth of the time (of 64 bytes of each of 8 ranks on 2 cores).
    """
    device = control_device()
    if device.type != "cpu":
        return _all_gathered_over(device, data, ranks)
    found = torch.empty((ranks, len(data)), dtype=torch.uint8)
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if found.numel() <= _LITTLE_BYTES:
        dist.gather(own, list(found.unbind()) if is_first_rank() else None)
        dist.broadcast(found, 0)
    else:
        dist.all_gather(list(found.unbind()), own)
    gathered: NDArray[numpy.uint8] = found.numpy()
    return gathered


def _all_gathered_over(device: torch.device, data: bytes, ranks: int) -> NDArray[numpy.uint8]:
    """The same over a device's memory, as much at a time as there is room for.

    Of `all_gather`, NCCL would put the parts together in memory of its own (`ProcessGroupNCCL::allgather`,
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, 2.4 to 2.13).
    """
    width = max(1, _LITTLE_BYTES // (ranks + 1))
    blocks = []
    for start in range(0, len(data), width):
        part = bytearray(data[start : start + width])
        memory = _room(device)[: (ranks + 1) * len(part)].view(ranks + 1, len(part))
        memory[ranks].copy_(torch.frombuffer(part, dtype=torch.uint8))
        dist.all_gather_into_tensor(memory[:ranks].view(-1), memory[ranks])
        blocks.append(memory[:ranks].cpu().numpy())
    return numpy.concatenate(blocks, axis=1)


def agreed(phase: str, work: Callable[[], Result], consequence: str = OPTIMIZER_UNCHANGED) -> list[Result]:
    """Do `work` on every rank; its results from all ranks, or the same refusal on all.

    Args:
        phase: what is being done, for the message.
        work: must not communicate.
        consequence: the state in which a refusal leaves the job.

    Raises:
        ResumeRefusedError: some rank's work raised; the message holds the reasons.
    """
    return list(agreed_among(lambda item: dict(enumerate(gather(item))), phase, work, consequence).values())


def agreed_among(
    exchange: Callable[[Any], dict[int, Any]], phase: str, work: Callable[[], Result], consequence: str
) -> dict[int, Result]:
    """Like `agreed`, among some ranks of the job.

    Args:
        exchange: takes an item of this rank, returns the items of all ranks concerned, by rank.
        phase: as there.
        work: as there.
        consequence: as there.

    Raises:
        ResumeRefusedError: some rank's work raised; the message holds the reasons.
    """
    result: Result | None = None
    cause: Exception | CheckpointException | None = None
    with collector_paused():  # for every few plans that are made, it would look through the whole program
        try:
            result = work()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - the latter is no Exception
            cause = error
        outcomes = exchange((result, None if cause is None else reason_of(cause)))
    refused = {rank: reason for rank, (_, reason) in outcomes.items() if reason is not None}
    if refused:
        raise refusal(phase, refused, consequence) from cause
    return {rank: found for rank, (found, _) in outcomes.items()}


def agreed_here(phase: str, work: Callable[[], Result], consequence: str = OPTIMIZER_UNCHANGED) -> Result:
    """Like `agreed`, but returns this rank's own result, which stays here."""
    kept: list[Result] = []
    agreed(phase, lambda: kept.append(work()), consequence)
    return kept[0]


def attempt(work: Callable[[], object]) -> str | None:
    """Do it; returns what went wrong, in one line, or None."""
    try:
        work()
    except (Exception, Failure) as error:  # noqa: BLE001 - told to all ranks by the caller
        return text_of(error)
    return None


def reason_of(error: BaseException) -> str:
    """An error with its class; what Megatron collects of several ranks is spelt out."""
    return f"{type(error).__name__}: {error}" if _has_own_message(error) else text_of(error)


def text_of(error: BaseException) -> str:
    """An error of this package as it is, any other with its class; of Megatron's collected ones, each rank's last line.

    On ranks other than 0, Megatron's says nothing.
    """
    if isinstance(error, Failure) and not _has_own_message(error):
        return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
    return format_error(error)


def _has_own_message(error: BaseException) -> bool:
    """Whether the error's own text is complete: an error of this package may be a `Failure` besides."""
    return isinstance(error, CheckpointError) or not isinstance(error, Failure)


def reasons_of_all(reason: str | None) -> str:
    """The reasons of the ranks that have one, on every rank."""
    return listed_of_all(gather(reason))


def listed_of_all(reasons: Sequence[str | None]) -> str:
    """The reasons of the ranks that have one, given that of every rank; empty where none has."""
    return _listed({rank: text for rank, text in enumerate(reasons) if text is not None})


def refusal(phase: str, reasons: dict[int, str], consequence: str = OPTIMIZER_UNCHANGED) -> ResumeRefusedError:
    """The error that all ranks raise where some refuse: the distinct reasons, each with the ranks that gave it.

    Args:
        phase: as of `agreed`.
        reasons: those of the ranks that have one, see `reason_of`.
        consequence: as there.
    """
    return ResumeRefusedError(refusal_text(phase, _listed(reasons), consequence))


def refusal_text(phase: str, reason: str, consequence: str = OPTIMIZER_UNCHANGED) -> str:
    """The sentence of a refusal: in which phase, what is left as it was, and why."""
    return f"mcore_ckpt_ext refused while {phase}; {consequence}\n  {reason}"


def _listed(reasons: dict[int, str]) -> str:
    """Each reason with its ranks, empty where there is none; ranks that say nothing only know that another failed."""
    ranks_of: dict[str, list[int]] = {}
    for rank, reason in ({rank: text for rank, text in reasons.items() if text} or reasons).items():
        ranks_of.setdefault(reason, []).append(rank)
    lines = [f"rank {format_ranks(ranks)}: {reason}" for reason, ranks in ranks_of.items()]
    more = f"\n  and {len(lines) - _SHOWN} more reasons" if len(lines) > _SHOWN else ""
    return "\n  ".join(lines[:_SHOWN]) + more
