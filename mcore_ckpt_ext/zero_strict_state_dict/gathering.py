"""Chunks, gathered one at a time into memory that is let go before the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mcore_ckpt_ext.zero_strict_state_dict import tensor_parallel
from mcore_ckpt_ext.zero_strict_state_dict.wrapper import Place, Wrapped

# What one rank sends at a time. Gloo copies everything that one gather receives once more, NCCL stages it on the
# device; in pieces that costs a few MiB, not a second chunk.
_PIECE_BYTES = 4 << 20


def whole_values(
    zero: Wrapped, places: Mapping[nn.Parameter, Place], held: Callable[[Any], torch.Tensor], dtype: torch.dtype,
    *, device: torch.device, everywhere: bool,
) -> Iterator[tuple[nn.Parameter, torch.Tensor | None]]:  # fmt: skip
    """Every parameter of `places` with its whole value, in memory of its own; all ranks iterate, chunk by chunk.

    Args:
        zero: the wrapper.
        places: where each parameter lies, in an order that is the same on all ranks.
        held: what of a chunk this rank holds: its payload, or optimizer state laid out like it.
        dtype: what the values become before they travel.
        device: where the values go.
        everywhere: whether every rank receives them, or rank 0 of the group alone; the others get None.
    """
    receives = everywhere or zero.is_first
    for chunk, members in groupby(places.items(), key=lambda item: item[1].chunk):
        gathered = _gathered(chunk, held(chunk), dtype, everywhere)
        for parameter, place in members:
            if not receives or gathered is None:
                yield parameter, None
                continue
            local = gathered[place.begin : place.end].view(parameter.shape)
            yield parameter, own_copy(tensor_parallel.whole(parameter, local), dtype, device)
        del gathered


def own_copy(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The value in contiguous memory that nobody else uses."""
    copied = torch.empty(value.shape, dtype=dtype, device=device)
    return copied.copy_(value.detach())


def _gathered(chunk: Any, held: torch.Tensor, dtype: torch.dtype, everywhere: bool) -> torch.Tensor | None:
    """The whole chunk as a flat tensor, on the ranks that receive it.

    Where every rank holds all of it, that is the chunk's own memory, in its own dtype.
    """
    if chunk.is_gathered or chunk.pg_size == 1:
        return held
    # ColossalAI keeps this one where the group's backend can reach it, also when the payload is offloaded.
    device = chunk.cuda_global_chunk.device
    receives = everywhere or chunk.pg_rank == 0
    total = torch.empty(chunk.chunk_size, dtype=dtype, device=device) if receives else None
    step = _PIECE_BYTES // dtype.itemsize
    for start in range(0, chunk.shard_size, step):
        piece = held[start : start + step].to(device=device, dtype=dtype)
        windows = None
        if total is not None:
            starts = range(start, chunk.chunk_size, chunk.shard_size)
            windows = [_as_bytes(total[first : first + len(piece)]) for first in starts]
        if everywhere:
            dist.all_gather(windows, _as_bytes(piece), group=chunk.torch_pg)
        else:
            first_rank = dist.get_global_rank(chunk.torch_pg, 0)
            dist.gather(_as_bytes(piece), windows, dst=first_rank, group=chunk.torch_pg)
    return total


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    # Values travel untouched, and in dtypes that a backend may not know.
    return flat.view(torch.uint8)
