"""Executes the plans of several ranks together: data that several need is read once, and sent.

It is meant for file systems that are slower than the network between the ranks (`--ckpt-ext-read-once`). The needs of
all ranks determine who reads what (`planning.read_dedup`), so that no rank has to request anything from another.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
import torch.distributed as dist

from mcore_ckpt_ext.collectives import agree_here, rank_and_size
from mcore_ckpt_ext.devices import host_buffer
from mcore_ckpt_ext.group_device import payload_device
from mcore_ckpt_ext.planning.overlap import Runs
from mcore_ckpt_ext.planning.plan import Plan, PlannedRead
from mcore_ckpt_ext.planning.read_dedup import MESSAGE_BYTES, Message, Spans, merge_spans, plan_messages
from mcore_ckpt_ext.storage.checksums import is_plain
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.tensor_location import TensorLocation
from mcore_ckpt_ext.transfer import Destinations, Transfer

# Number of messages that a rank reads ahead of their turn.
_AHEAD = 2


def wanted_bytes(plan: Plan, transfer: Transfer) -> Spans:
    """Return the byte ranges that a plan reads from plain arrays.

    A range includes the gaps between rows, so if a matrix is split by columns, every rank gets the whole matrix.

    Raises:
        CheckpointError: a record contradicts the index.
    """
    starts: dict[str, list[Any]] = {}
    stops: dict[str, list[Any]] = {}
    for read in plan.reads:
        payload = transfer.locate(read.extent)
        if is_plain(read, payload):
            low, high = _hull(read.runs)
            starts.setdefault(payload.file, []).append(payload.offset + low * payload.dtype.itemsize)
            stops.setdefault(payload.file, []).append(payload.offset + high * payload.dtype.itemsize)
    return {
        file: merge_spans(numpy.concatenate(starts[file]), numpy.concatenate(stops[file])) for file in sorted(starts)
    }


def _hull(runs: Runs) -> tuple[Any, Any]:
    """Return the first source element of each entry, and the end of the last row."""
    last = runs.source + (runs.count - 1) * runs.source_stride
    return numpy.minimum(runs.source, last), numpy.maximum(runs.source, last) + runs.length


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements of a message, of `dtype`, and where they go in the destination with index `target`."""

    target: int
    dtype: torch.dtype
    runs: Runs


class ReadOnce:
    """One rank's part in executing the plans of several ranks."""

    def __init__(self, plan: Plan, reader: FolderReader, transfer: Transfer, wants: Sequence[Spans]) -> None:
        """Divide the plan; nothing is read or sent yet.

        Args:
            plan: this rank's plan.
            reader: reads the checkpoint's folder.
            transfer: executes plans on the same folder.
            wants: `wanted_bytes` of every rank.
        """
        self._reader = reader
        self._transfer = transfer
        self._rank = rank_and_size()[0]
        self._messages = plan_messages(wants, self._rank)
        self._parts: list[list[_Part]] = [[] for _ in self._messages]
        self._has_taken_part = False
        places: dict[str, list[tuple[int, int, int, int]]] = {}
        for number, message in enumerate(self._messages):
            for stretch in message.stretches:
                places.setdefault(stretch.file, []).append((stretch.start, stretch.stop, stretch.at, number))
        reads: list[PlannedRead] = []
        for read in plan.reads:
            payload = transfer.locate(read.extent)
            reads += self._divide(read, payload, places.get(payload.file, [])) if is_plain(read, payload) else [read]
        self._own = replace(plan, reads=reads)

    def _divide(
        self, read: PlannedRead, payload: TensorLocation, places: list[tuple[int, int, int, int]]
    ) -> Iterator[PlannedRead]:
        """Yield the parts of a read that this rank reads for itself; record those that come in messages.

        Args:
            read: a read of plain elements.
            payload: where they lie.
            places: the message parts in its file, ascending: first byte, end, place in the message, message number.
        """
        size = payload.dtype.itemsize
        low, high = (int(edge) for edge in (_hull(read.runs)[0].min(), _hull(read.runs)[1].max()))
        first = bisect_right(places, payload.offset + low * size, key=lambda place: place[1])
        last = bisect_left(places, payload.offset + high * size, key=lambda place: place[0])
        done = low
        for start, stop, at, number in places[first:last]:
            begin = (start - payload.offset) // size
            end = (stop - payload.offset) // size
            yield from _some(read, done, begin)
            if len(inside := read.runs.within(begin, end)):
                self._parts[number].append(_Part(read.target, payload.dtype.torch, inside.shift(at // size - begin, 0)))
            done = end
        yield from _some(read, done, high)

    def execute(self, destinations: Destinations) -> None:
        """Fill the destinations, like `Transfer.execute`. Collective.

        If something fails, this rank still takes part until all ranks have their data, and raises then.

        Raises:
            UnreadableCheckpointError: a file is damaged; some elements, also on other ranks, may be wrong.
        """
        with self.taking_part():
            self._transfer.execute(self._own, destinations)
            self._exchange(destinations)

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Within this scope, a rank that fails before the exchange still takes part in it."""
        try:
            yield
        except Exception:
            if not self._has_taken_part:
                self._exchange(None)
            raise

    def _exchange(self, destinations: Destinations | None) -> None:
        self._has_taken_part = True
        problems: list[Exception] = []

        def attempt(work: Callable[[], object]) -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised below, when no rank waits for this one
                problems.append(error)

        read_into, received = agree_here("making room for what is read once", self._room, "nothing was sent")
        with ThreadPoolExecutor(1, thread_name_prefix="mcore_ckpt_ext") as pool:
            ahead = self._read_ahead(pool, read_into)
            for message, parts in zip(self._messages, self._parts, strict=True):
                there = received[: message.nbytes]
                if message.reader == self._rank:
                    data, reading = next(ahead)
                    attempt(reading.result)
                    there = data if data.device == there.device else there.copy_(data)
                _pass_on(there, message, self._rank)
                if destinations is not None:
                    for part in parts:
                        attempt(lambda part=part, there=there: _place(part, there, destinations))  # type: ignore[misc]
        if problems:
            raise problems[0]

    @property
    def _own_messages(self) -> list[Message]:
        return [message for message in self._messages if message.reader == self._rank]

    def _room(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Allocate memory to read messages into, and for the current message, before the first is sent.

        A rank that failed to allocate later would leave the others waiting.
        """
        count = min(len(self._own_messages), _AHEAD + 1)
        largest = max((message.nbytes for message in self._messages), default=0)
        received = torch.empty(largest, dtype=torch.uint8, device=payload_device())
        return [host_buffer(MESSAGE_BYTES) for _ in range(count)], received

    def _read_ahead(
        self, pool: ThreadPoolExecutor, room: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, Future[None]]]:
        """Yield the messages that this rank reads, with futures; each call releases the previous buffer."""
        messages = self._own_messages
        count = len(room)
        begun: deque[tuple[torch.Tensor, Future[None]]] = deque()
        for number, message in enumerate(messages):
            data = room[number % count][: message.nbytes]
            begun.append((data, pool.submit(self._read, message, data)))
            if len(begun) == count:
                yield begun.popleft()
        yield from begun

    def _read(self, message: Message, data: torch.Tensor) -> None:
        memory = memoryview(data.numpy())
        for stretch in message.stretches:
            place = memory[stretch.at : stretch.at + stretch.stop - stretch.start]
            self._reader.read_into(stretch.file, stretch.start, place)


def _some(read: PlannedRead, low: int, high: int) -> Iterator[PlannedRead]:
    """Yield the part of a read whose source lies in `[low, high)`, if any."""
    if low < high and len(runs := read.runs.within(low, high)):
        yield read._replace(runs=runs)


def _pass_on(data: torch.Tensor, message: Message, rank: int) -> None:
    """Receive a message, unless this rank reads it, and send it on to the ranks that get it from here."""
    giver, others = message.route(rank)
    if giver is not None:
        _wait_for([dist.P2POp(dist.irecv, data, giver)])
    if others:
        _wait_for([dist.P2POp(dist.isend, data, other) for other in others])


def _wait_for(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _place(part: _Part, data: torch.Tensor, destinations: Destinations) -> None:
    elements = data.view(part.dtype)
    destination = destinations[part.target]
    for source, target, length, count, source_stride, target_stride in part.runs.rows():
        places = destination.as_strided((count, length), (target_stride, 1), destination.storage_offset() + target)
        places.copy_(elements.as_strided((count, length), (source_stride, 1), source))
