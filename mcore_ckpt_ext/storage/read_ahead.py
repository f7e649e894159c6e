"""Requests ranges of files in a remote store before they are read.

Each answer of a store takes a while to come. A reader names what it is about to read (`ReadAhead.over`). Up to
`REQUESTS` requests are then under way, of all threads together, and their answers take about `BYTES` of memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

STORE_BLOCK_BYTES = 1 << 17
"""Smaller ranges come from blocks of this size. The header of an array, too, costs a whole block."""
PART_BYTES = 4 << 20
"""Larger ranges are requested in parts of this size."""
REQUESTS = 16
"""The largest number of requests under way."""
BYTES = 24 << 20
"""The most bytes that are requested ahead. Beyond it, each thread requests the part that it reads."""
_BYTES_OF_READER = BYTES // 2
_KEPT_BLOCKS = 96

Item = TypeVar("Item")
FileRange = tuple[str, int, int]
"""Consecutive bytes of a file: the file, the first byte, and the number of bytes."""


@dataclass(frozen=True, eq=False)
class _Request:
    """A request for bytes `[start, stop)` of a file."""

    file: str
    start: int
    stop: int
    data: Future[bytes]


class ReadAhead:
    """The requests for ranges of the files of one folder; safe to use from several threads.

    Args:
        fetch: requests bytes `[start, stop)` of a file, and returns them; it may raise any error, which `fill` raises.
    """

    def __init__(self, fetch: Callable[[str, int, int], bytes]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._blocks: OrderedDict[tuple[str, int], _Request] = OrderedDict()
        self._parts: dict[str, list[_Request]] = {}
        self._bytes = 0

    def over(self, items: Iterable[Item], ranges: Callable[[Item], Iterable[FileRange]]) -> Iterator[Item]:
        """Yield items in their order, each after the ranges of the next ones have been requested.

        Args:
            items: anything; taken one after the other, a few ahead.
            ranges: returns the ranges within their files that an item reads. Its errors are raised.
        """
        window: deque[tuple[Item, list[_Request]]] = deque()
        left = iter(items)
        requested = 0
        try:
            while True:
                # An item that is taken when there is no memory would never be requested ahead.
                while not window or (len(window) < REQUESTS and requested < _BYTES_OF_READER and self._bytes < BYTES):
                    try:
                        item = next(left)
                    except StopIteration:
                        break
                    requests = self._request_ahead(ranges(item))
                    requested += _bytes_of(requests)
                    window.append((item, requests))
                if not window:
                    return
                yield window[0][0]
                _, requests = window.popleft()
                requested -= _bytes_of(requests)
                self._drop(requests)
        finally:
            for _, requests in window:
                self._drop(requests)

    def fill(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file, with what was requested ahead as far as it goes."""
        if len(buffer) < STORE_BLOCK_BYTES:
            self._copy(file, offset, buffer, is_small=True)
            return
        parts = _parts(file, offset, offset + len(buffer))
        for _, start, count in self.over(parts, lambda part: [part]):
            self._copy(file, start, buffer[start - offset : start - offset + count], is_small=False)

    def close(self) -> None:
        """Drop all requests and what they brought."""
        with self._lock:
            pool = self._pool
            self._pool = None
            self._blocks.clear()
            self._parts.clear()
            self._bytes = 0
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _copy(self, file: str, offset: int, buffer: memoryview, *, is_small: bool) -> None:
        done = 0
        while done < len(buffer):
            position = offset + done
            request = self._request_of(file, position, offset + len(buffer), is_small=is_small)
            try:
                data = request.data.result()
            except CancelledError:  # another thread dropped it: it is not found again
                continue
            except BaseException:
                self._drop([request])
                self._forget_block(request)
                raise
            part = memoryview(data)[position - request.start :][: len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            if position + len(part) == request.stop:
                self._drop([request])

    def _request_of(self, file: str, position: int, end: int, *, is_small: bool) -> _Request:
        """Return the request for a byte, a new one if there is none."""
        with self._lock:
            request = self._covering(file, position)
            if request is not None:
                return request
            return self._block(file, position // STORE_BLOCK_BYTES) if is_small else self._part(file, position, end)

    def _covering(self, file: str, position: int) -> _Request | None:
        """Return a request that has been made for a byte."""
        key = file, position // STORE_BLOCK_BYTES
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        parts = self._parts.get(file, ())
        return next((request for request in parts if request.start <= position < request.stop), None)

    def _request_ahead(self, ranges: Iterable[FileRange]) -> list[_Request]:
        """Request what has not been requested of ranges, as far as the memory allows."""
        new: list[_Request] = []
        for file, start, count in ranges:
            for _, begin, length in _parts(file, start, start + count):
                with self._lock:
                    if self._bytes >= BYTES or _bytes_of(new) >= _BYTES_OF_READER:
                        return new
                    if count < STORE_BLOCK_BYTES:
                        new += self._new_blocks(file, begin, begin + length)
                    else:
                        new += self._new_parts(file, begin, begin + length)
        return new

    def _new_blocks(self, file: str, start: int, stop: int) -> list[_Request]:
        numbers = range(start // STORE_BLOCK_BYTES, -(-stop // STORE_BLOCK_BYTES))
        return [self._block(file, number) for number in numbers if (file, number) not in self._blocks]

    def _new_parts(self, file: str, start: int, stop: int) -> list[_Request]:
        """Request a range, without what other requests cover at its ends."""
        while start < stop and (request := self._covering(file, start)) is not None:
            start = request.stop
        while start < stop and (request := self._covering(file, stop - 1)) is not None:
            stop = request.start
        return [self._part(file, start, stop)] if start < stop else []

    def _block(self, file: str, number: int) -> _Request:
        """Return the request for a block; threads that need the same one wait for one request."""
        key = file, number
        if key not in self._blocks:
            start = number * STORE_BLOCK_BYTES
            self._blocks[key] = self._begin(file, start, start + STORE_BLOCK_BYTES)
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _part(self, file: str, start: int, stop: int) -> _Request:
        request = self._begin(file, start, stop)
        self._parts.setdefault(file, []).append(request)
        self._bytes += stop - start
        return request

    def _begin(self, file: str, start: int, stop: int) -> _Request:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="mcore_ckpt_ext_store")
        return _Request(file, start, stop, self._pool.submit(self._fetch, file, start, stop))

    def _drop(self, requests: Iterable[_Request]) -> None:
        """Forget parts that are not read any more; blocks are kept for the next reader."""
        with self._lock:
            for request in requests:
                parts = self._parts.get(request.file, [])
                if request in parts:
                    parts.remove(request)
                    self._bytes -= request.stop - request.start
                    request.data.cancel()

    def _forget_block(self, request: _Request) -> None:
        """Forget a block whose request has failed, so that it is requested again."""
        with self._lock:
            key = request.file, request.start // STORE_BLOCK_BYTES
            if self._blocks.get(key) is request:
                del self._blocks[key]


def _parts(file: str, start: int, stop: int) -> list[FileRange]:
    """Divide a range into parts that are requested separately."""
    return [(file, begin, min(PART_BYTES, stop - begin)) for begin in range(start, stop, PART_BYTES)]


def _bytes_of(requests: Iterable[_Request]) -> int:
    return sum(request.stop - request.start for request in requests)
