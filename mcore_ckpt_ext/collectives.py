"""Collectives that raise an error on all ranks when one rank fails.

No rank then waits in a collective for a rank that has refused.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt_ext.errors import CheckpointError, ResumeRefusedError, format_error, format_ranks, quantity
from mcore_ckpt_ext.group_device import control_device
from mcore_ckpt_ext.storage.gc_pause import collector_paused

Result = TypeVar("Result")
_SHOWN = 4
_SIZE_BYTES = 8
_SHORT_BYTES = 56
# Limit of the total size of a message over all ranks, and size of the device memory for messages.
_LITTLE_BYTES = 1 << 20
# `gather` broadcasts different long items one by one if there is at most one for every `_FEW` ranks.
_FEW = 4
OPTIMIZER_UNCHANGED = "the optimizer is unchanged"
"""States, in messages, what a refused load leaves unchanged."""
Failure = CheckpointException
"""The error that torch and Megatron raise when some rank failed; it does not derive from Exception."""


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; `(0, 1)` without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_first_rank() -> bool:
    """Return True on rank 0, which writes files and log lines for all ranks."""
    return rank_and_size()[0] == 0


def gather(item: Result, group: Any = None) -> list[Result]:
    """Return the items of all ranks, in rank order; equal items may be one object.

    Thousands of ranks often have equal or short items. So each rank first sends its item if it is short, else the
    item's digest. If few different items are long, the first rank that has each broadcasts it; otherwise all
    ranks send their items, padded to the largest size.

    Args:
        item: this rank's item.
        group: the ranks that take part; by default all ranks of the job.
    """
    if not dist.is_initialized():
        return [item]
    data = pickle.dumps(item)
    ranks = dist.get_world_size(group)
    local_mark = _mark(data)
    marks = [mark.tobytes() for mark in _all_gathered(local_mark, ranks, group)]
    firsts: dict[bytes, int] = {}
    for rank, mark in enumerate(marks):
        firsts.setdefault(mark, rank)
    if len(firsts) == 1:
        return [item] * ranks
    # Ranks of this job made the pickles, as with torch's own collectives of objects.
    items_by_mark: dict[bytes, Result] = {
        mark: pickle.loads(short) for mark in firsts if (short := _short_bytes(mark)) is not None
    }
    items_by_mark[local_mark] = item
    long = {mark: first for mark, first in firsts.items() if _short_bytes(mark) is None}
    if len(long) * _FEW > ranks:
        sizes = list(map(_size_in, marks))
        gathered = _all_gathered(data.ljust(max(sizes), b"\0"), ranks, group)
        return [
            item if mark == local_mark else pickle.loads(padded[:size])
            for padded, size, mark in zip(gathered, sizes, marks, strict=True)
        ]
    for mark, first in long.items():
        sent = _broadcast(data if mark == local_mark else bytes(_size_in(mark)), first, group)
        if mark != local_mark:
            items_by_mark[mark] = pickle.loads(sent)
    return [items_by_mark[mark] for mark in marks]


def highest_of_all(numbers: Sequence[int], group: Any = None) -> list[int]:
    """Return the maximum over all ranks of a group (by default, of the job), number by number."""
    device = control_device(group)
    local = torch.tensor(numbers, dtype=torch.int64)
    maxima = local if device.type == "cpu" else _room(device)[: local.nbytes].view(torch.int64).copy_(local)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    highest: list[int] = maxima.tolist()
    return highest


@cache
def _room(device: torch.device) -> torch.Tensor:
    """Return preallocated device memory for messages: a rank out of memory can still communicate.

    It is allocated at the first exchange between ranks, before anything large is read.
    """
    return torch.empty(_LITTLE_BYTES, dtype=torch.uint8, device=device)


def _broadcast(data: bytes, first: int, group: Any) -> bytes:
    """Return the bytes of a group's rank `first` on all its ranks; `data` has one length on all ranks."""
    device = control_device(group)
    source = _rank_in_job(group, first)
    if device.type == "cpu":
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(sent, source, group)
        return sent.numpy().tobytes()
    blocks = []
    for start in range(0, len(data), _LITTLE_BYTES):
        part = bytearray(data[start : start + _LITTLE_BYTES])
        block = _room(device)[: len(part)].copy_(torch.frombuffer(part, dtype=torch.uint8))
        dist.broadcast(block, source, group)
        blocks.append(block.cpu().numpy().tobytes())
    return b"".join(blocks)


def _rank_in_job(group: Any, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _mark(data: bytes) -> bytes:
    """Return the size of the data, followed by the data if they are short, else by their digest."""
    short = data if len(data) <= _SHORT_BYTES else hashlib.blake2b(data, digest_size=_SHORT_BYTES).digest()
    return len(data).to_bytes(_SIZE_BYTES, "little") + short.ljust(_SHORT_BYTES, b"\0")


def _size_in(mark: bytes) -> int:
    return int.from_bytes(mark[:_SIZE_BYTES], "little")


def _short_bytes(mark: bytes) -> bytes | None:
    """Return the bytes that a mark contains.

    Returns:
        The bytes, or None if they are long, so that the mark holds their digest.
    """
    size = _size_in(mark)
    return mark[_SIZE_BYTES : _SIZE_BYTES + size] if size <= _SHORT_BYTES else None


def _all_gathered(data: bytes, ranks: int, group: Any) -> NDArray[numpy.uint8]:
    """Gather bytes from every rank of a group, all of one length: `[ranks, bytes]`.

    Gloo's `all_gather` passes data from rank to rank. For little data, a gather to rank 0 and a broadcast take a fifth
    of the time (measured with 64 bytes of each of 8 ranks on 2 cores).
    """
    device = control_device(group)
    if device.type != "cpu":
        return _all_gathered_over(device, data, ranks, group)
    rows = torch.empty((ranks, len(data)), dtype=torch.uint8)
    local_row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if rows.numel() <= _LITTLE_BYTES:
        first = _rank_in_job(group, 0)
        is_first = dist.get_rank(group) == 0
        dist.gather(local_row, list(rows.unbind()) if is_first else None, first, group)
        dist.broadcast(rows, first, group)
    else:
        dist.all_gather(list(rows.unbind()), local_row, group)
    gathered: NDArray[numpy.uint8] = rows.numpy()
    return gathered


def _all_gathered_over(device: torch.device, data: bytes, ranks: int, group: Any) -> NDArray[numpy.uint8]:
    """Gather bytes over a device's memory, in parts that fit into the preallocated memory.

    With `all_gather`, NCCL would join the parts in memory of its own (`ProcessGroupNCCL::allgather`,
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, 2.4 to 2.13).
    """
    width = max(1, _LITTLE_BYTES // (ranks + 1))
    blocks = []
    for start in range(0, len(data), width):
        part = bytearray(data[start : start + width])
        memory = _room(device)[: (ranks + 1) * len(part)].view(ranks + 1, len(part))
        memory[ranks].copy_(torch.frombuffer(part, dtype=torch.uint8))
        dist.all_gather_into_tensor(memory[:ranks].view(-1), memory[ranks], group)
        blocks.append(memory[:ranks].cpu().numpy())
    return numpy.concatenate(blocks, axis=1)


@dataclass(frozen=True)
class TorchRanks:
    """Ranks of torch.distributed: a `Communicator` of the whole job, or of this rank's groups.

    Args:
        groups: process groups along axes; an exchange in one after the other reaches all ranks. None is the default
            group.
    """

    groups: tuple[Any, ...] = (None,)

    @property
    def rank(self) -> int:
        """The number of this rank in the job."""
        return rank_and_size()[0]

    @property
    def size(self) -> int:
        """The number of ranks in the job."""
        return rank_and_size()[1]

    @property
    def is_first(self) -> bool:
        """True on rank 0 of the job."""
        return is_first_rank()

    def items_by_rank(self, item: Result) -> dict[int, Result]:
        """Return an item of every rank, by its rank in the job."""
        if self.groups == (None,):
            return dict(enumerate(gather(item)))
        items = {dist.get_rank(): item}
        for group in self.groups:
            items = {rank: received for part in gather(items, group) for rank, received in part.items()}
        return dict(sorted(items.items()))

    def gather(self, item: Result) -> list[Result]:
        """Return an item of every rank, in their order."""
        return list(self.items_by_rank(item).values())

    def agree(
        self, work: Callable[[], Result], phase: str = "", consequence: str = OPTIMIZER_UNCHANGED
    ) -> list[Result]:
        """Do `work` on every rank; return the results of all ranks, or raise the same refusal on all.

        Raises:
            ResumeRefusedError: the work of some rank raised; the message has phase, consequence and all reasons.
        """
        return list(self.agree_by_rank(work, phase, consequence).values())

    def agree_here(self, work: Callable[[], Result], phase: str, consequence: str) -> Result:
        """Do what `agree` does, but return only this rank's own result, which is not sent."""
        kept: list[Result] = []
        self.agree(lambda: kept.append(work()), phase, consequence)
        return kept[0]

    def agree_by_rank(self, work: Callable[[], Result], phase: str, consequence: str) -> dict[int, Result]:
        """Do what `agree` does; return the results by rank in the job."""
        result: Result | None = None
        cause: Exception | CheckpointException | None = None
        with collector_paused():  # planning allocates many objects; each collection would scan the whole program
            try:
                result = work()
            except (Exception, CheckpointException) as error:  # noqa: BLE001 - the latter is no Exception
                cause = error
            outcomes = self.items_by_rank((result, None if cause is None else reason_of(cause)))
        refused = {rank: reason for rank, (_, reason) in outcomes.items() if reason is not None}
        if refused:
            raise refusal(phase, refused, consequence) from cause
        return {rank: outcome for rank, (outcome, _) in outcomes.items()}  # type: ignore[misc]  # none failed


JOB = TorchRanks()
"""All ranks of this job."""


def agree(phase: str, work: Callable[[], Result], consequence: str = OPTIMIZER_UNCHANGED) -> list[Result]:
    """Do `work` on every rank of the job; see `TorchRanks.agree`."""
    return JOB.agree(work, phase, consequence)


def agree_here(phase: str, work: Callable[[], Result], consequence: str = OPTIMIZER_UNCHANGED) -> Result:
    """Do what `agree` does, but return only this rank's own result, which is not sent."""
    return JOB.agree_here(work, phase, consequence)


def attempt(work: Callable[[], object]) -> str | None:
    """Call a function and catch its errors.

    Returns:
        The error in one line, or None if there was none.
    """
    try:
        work()
    except (Exception, Failure) as error:  # noqa: BLE001 - the caller reports it to all ranks
        return text_of(error)
    return None


def reason_of(error: BaseException) -> str:
    """Return an error with its class; expand an error that Megatron collected from several ranks."""
    return f"{type(error).__name__}: {error}" if _has_own_message(error) else text_of(error)


def text_of(error: BaseException) -> str:
    """Return the text of an error, preceded by its class unless it is an error of this package.

    If Megatron collected it from several ranks, the text has the last line of each rank's error.
    Megatron's collected error has no text of its own on ranks other than 0.
    """
    if isinstance(error, Failure) and not _has_own_message(error):
        return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
    return format_error(error)


def _has_own_message(error: BaseException) -> bool:
    """Return whether the text of an error is complete, as it is unless the error is a foreign `Failure`."""
    return isinstance(error, CheckpointError) or not isinstance(error, Failure)


def reasons_of_all(reason: str | None) -> str:
    """Collect reasons from all ranks and list them on every rank; empty if there is none."""
    return list_reasons_of_all(gather(reason))


def list_reasons_of_all(reasons: Sequence[str | None]) -> str:
    """List the reasons of the ranks, one item a rank; the result is empty if all are None."""
    return _list_reasons({rank: text for rank, text in enumerate(reasons) if text is not None})


def refusal(phase: str, reasons: dict[int, str], consequence: str = OPTIMIZER_UNCHANGED) -> ResumeRefusedError:
    """Make the error that all ranks raise if some refuse: the distinct reasons, each with its ranks.

    Args:
        phase: names the work in the message.
        reasons: texts by `reason_of`, by rank; ranks that did not refuse are absent.
        consequence: the state in which a refusal leaves the job.
    """
    return ResumeRefusedError(refusal_text(phase, _list_reasons(reasons), consequence))


def refusal_text(phase: str, reason: str, consequence: str = OPTIMIZER_UNCHANGED) -> str:
    """Return the message of a refusal: the phase, what is left unchanged, and the reason."""
    return f"mcore_ckpt_ext refused while {phase}; {consequence}\n  {reason}"


def _list_reasons(reasons: dict[int, str]) -> str:
    """List each reason with its ranks; leave out empty reasons unless all are empty.

    A rank with an empty reason only reports that another rank failed.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, reason in ({rank: text for rank, text in reasons.items() if text} or reasons).items():
        ranks_of.setdefault(reason, []).append(rank)
    lines = [f"rank {format_ranks(ranks)}: {reason}" for reason, ranks in ranks_of.items()]
    more = f"\n  and {quantity(len(lines) - _SHOWN, 'more reason')}" if len(lines) > _SHOWN else ""
    return "\n  ".join(lines[:_SHOWN]) + more
