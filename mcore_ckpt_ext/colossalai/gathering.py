"""Gathers parameters chunk by chunk, directly into the memory of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mcore_ckpt_ext.colossalai import tensor_parallel
from mcore_ckpt_ext.colossalai.ranks import GroupErrors
from mcore_ckpt_ext.colossalai.tensor_parallel import as_bytes
from mcore_ckpt_ext.colossalai.wrapper import Place, Wrapped

# Elements that one rank sends at a time. Gloo copies what a gather receives, and NCCL stages it on the device: with
# pieces this takes a few MiB instead of a second chunk.
_PIECE_BYTES = 4 << 20
_NOTHING = torch.empty(0)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Gather:
    """A gather of a wrapper's values: which ranks receive them, where, and how all stop if one fails.

    Args:
        zero: the wrapper.
        errors: stops all ranks if one fails, before the next chunk or at the end.
        everywhere: True if every rank receives the values, else only rank 0 of the group; the others get None.
        device: the device of the values.
    """

    zero: Wrapped
    errors: GroupErrors
    everywhere: bool
    device: torch.device = _CPU

    @property
    def receives(self) -> bool:
        """True if this rank receives the values."""
        return self.everywhere or self.zero.is_first

    def whole_values(
        self,
        places: Mapping[nn.Parameter, Place],
        held: Callable[[Any], torch.Tensor],
        dtype: torch.dtype,
        padding: dict[nn.Parameter, torch.Tensor] | None = None,
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor | None]]:
        """Yield each parameter of `places` with its gathered value; all ranks must iterate, chunk by chunk.

        Args:
            places: the place of each parameter, in an order that is the same on all ranks.
            held: returns this rank's part of a chunk: its payload, or optimizer state with the same layout.
            dtype: the dtype in which values are sent and returned.
            padding: on receiving ranks, receives the padding rows of each parameter that has some.

        Raises:
            ResumeRefusedError: on all ranks.
        """
        attempt = self.errors.attempt
        for chunk, group in groupby(places.items(), key=lambda item: item[1].chunk):
            members = list(group)
            payload = attempt(partial(held, chunk))
            staging = attempt(partial(_staging, chunk, payload, dtype))
            room = attempt(partial(_room, chunk, payload, members, dtype, self.device)) if self.receives else None
            self.errors.raise_on_all()
            scattered = _is_scattered(chunk)
            if scattered:
                # No rank has failed, so the payload is there.
                _exchange(chunk, payload, members, room, staging, self.everywhere)  # type: ignore[arg-type]
            for place, (parameter, (_, begin, end)) in enumerate(members):
                if room is None:
                    yield parameter, None
                    continue
                local = room.values[place] if scattered else payload[begin:end]  # type: ignore[index]
                local = local.view(parameter.shape)
                cut = room.cut[place]
                if (staged := room.staged[place]) is not None:
                    local = staged.copy_(local)
                whole = tensor_parallel.whole(parameter, local, cut)
                if padding is not None:
                    rows = attempt(partial(tensor_parallel.padding_of, parameter, cut, local))
                    if rows is not None:
                        padding[parameter] = rows
                is_own = whole is local and scattered
                yield parameter, whole if is_own else attempt(partial(own_copy, whole, dtype, self.device))
                room.cut[place] = room.staged[place] = None
                if scattered:
                    room.values[place] = _NOTHING
            del payload, room, staging
        self.errors.raise_on_all()


def own_copy(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy a value into new memory, with its strides if it is dense; the result is a plain tensor.

    Operations on ColossalAI's tensor subclasses would return instances of the subclasses (tensor/colo_tensor.py).
    """
    with torch._C.DisableTorchFunction():
        copied = torch.empty_like(value, dtype=dtype, device=device, requires_grad=False)
        copied.copy_(value.detach())
    return copied


class _Room(NamedTuple):
    """Buffers that receive a chunk.

    Args:
        values: flat memory for each parameter, in order.
        windows: two buffers for the pieces of all ranks: one is received while the other is read.
        cut: for each parameter, the buffers to join its tensor-parallel slices.
        staged: for each parameter with such slices, a buffer to send from, if the group cannot reach the slice.
    """

    values: list[torch.Tensor]
    windows: tuple[list[torch.Tensor], list[torch.Tensor]]
    cut: list[tensor_parallel.Room | None]
    staged: list[torch.Tensor | None]


def _is_scattered(chunk: Any) -> bool:
    """Return True if each rank holds a part of the chunk, and not all of it."""
    return not chunk.is_gathered and chunk.pg_size > 1


def _room(
    chunk: Any,
    held: torch.Tensor | None,
    members: list[tuple[nn.Parameter, Place]],
    dtype: torch.dtype,
    device: torch.device,
) -> _Room:
    """Allocate memory for the whole values.

    Tensor-parallel slices go where the groups' backends can reach them.
    """
    reached = chunk.cuda_global_chunk.device
    given = dtype if _is_scattered(chunk) or held is None else held.dtype
    cut = [tensor_parallel.room_for(parameter, given, reached) for parameter, _ in members]
    if not _is_scattered(chunk):
        is_reached = held is None or held.device == reached
        staged = [
            None if room is None or is_reached else torch.empty(parameter.shape, dtype=given, device=reached)
            for (parameter, _), room in zip(members, cut, strict=True)
        ]
        return _Room([], ([], []), cut, staged)
    values = [
        torch.empty(end - begin, dtype=dtype, device=reached if tensor_parallel.is_sharded(parameter) else device)
        for parameter, (_, begin, end) in members
    ]
    size = min(chunk.shard_size, _PIECE_BYTES // dtype.itemsize)
    first, second = ([torch.empty(size, dtype=dtype, device=reached) for _ in range(chunk.pg_size)] for _ in range(2))
    return _Room(values, (first, second), cut, [None] * len(members))


def _staging(chunk: Any, held: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Allocate two buffers for the pieces that this rank sends: none are allocated during a collective.

    Returns None if the chunk is sent from where it lies.
    """
    device = chunk.cuda_global_chunk.device
    if held is None or not _is_scattered(chunk) or (held.device == device and held.dtype == dtype):
        return None
    size = min(chunk.shard_size, _PIECE_BYTES // dtype.itemsize)
    return torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device)


def _exchange(
    chunk: Any,
    held: torch.Tensor,
    members: list[tuple[nn.Parameter, Place]],
    room: _Room | None,
    staging: tuple[torch.Tensor, torch.Tensor] | None,
    everywhere: bool,
) -> None:
    """Exchange a chunk in pieces, and copy each into its parameters while the next is sent."""
    step = _PIECE_BYTES // (held if staging is None else staging[0]).itemsize
    begun: tuple[Any, int, list[torch.Tensor]] | None = None
    for number, start in enumerate(range(0, chunk.shard_size, step)):
        piece = held[start : start + step]
        if staging is not None:
            piece = staging[number % 2][: len(piece)].copy_(piece)
        windows = [window[: len(piece)] for window in room.windows[number % 2]] if room is not None else []
        work = _send(chunk, piece, windows, everywhere)
        if begun is not None:
            _take(chunk, begun, members, room)
        begun = work, start, windows
    if begun is not None:
        _take(chunk, begun, members, room)


def _send(chunk: Any, piece: torch.Tensor, windows: list[torch.Tensor], everywhere: bool) -> Any:
    received = [as_bytes(window) for window in windows]
    if everywhere:
        return dist.all_gather(received, as_bytes(piece), group=chunk.torch_pg, async_op=True)
    first_rank = dist.get_global_rank(chunk.torch_pg, 0)
    return dist.gather(as_bytes(piece), received or None, dst=first_rank, group=chunk.torch_pg, async_op=True)


def _take(
    chunk: Any,
    begun: tuple[Any, int, list[torch.Tensor]],
    members: list[tuple[nn.Parameter, Place]],
    room: _Room | None,
) -> None:
    """Wait for a piece, and copy it into the parameters to which it belongs."""
    work, start, windows = begun
    work.wait()
    for rank, window in enumerate(windows):
        first = rank * chunk.shard_size + start
        for (_, place), value in zip(members, room.values if room is not None else (), strict=True):
            begin = max(place.begin, first)
            end = min(place.end, first + len(window))
            if begin < end:
                value[begin - place.begin : end - place.begin].copy_(window[begin - first : end - first])
