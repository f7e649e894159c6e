"""Reads rows of stored arrays into memory with few system calls and copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from mcore_ckpt_ext.lazy_torch import numpy, torch
from mcore_ckpt_ext.planning.overlap import Run, split_runs
from mcore_ckpt_ext.planning.plan import PlannedRead
from mcore_ckpt_ext.storage.checksums import is_plain
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.read_ahead import STORE_BLOCK_BYTES, FileRange
from mcore_ckpt_ext.storage.tensor_location import TensorLocation

# Gaps between rows are read as well if they are smaller than a page: this touches no further page, and copying costs
# less than a system call. Rows shorter than a page are then copied from a buffer that fits the processor's cache.
_MOST_GAP_BYTES = 4095
_LONG_ROW_BYTES = 1 << 12
_SCRATCH_BYTES = 1 << 19
# Longer rows are read many per call (`preadv`), with gaps no larger than a row read into a scratch buffer. This takes
# half to three quarters of the time of one call per row; with gaps beyond this limit it saves little.
_MOST_SKIPPED_BYTES = 1 << 13
# Each row and each gap is a buffer of the call, which accepts 1024 (IOV_MAX of Linux).
_ROWS_AT_ONCE = 512
# Rows without gaps are read many per call, unless they are as short as this.
_SHORT_ROW_BYTES = 1024
# Upper limit for the bytes of one call of `on_read`: half of a core's own cache, or less.
_SHOWN_BYTES = 1 << 19


class RowReader:
    """Reads runs of elements of stored arrays into memory; safe to use from several threads."""

    def __init__(self, reader: FolderReader) -> None:
        self._reader = reader
        self._scratch = threading.local()

    def read(
        self,
        location: TensorLocation,
        runs: Iterable[Run],
        destination: torch.Tensor,
        on_read: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read elements into a tensor.

        Args:
            location: location of the stored array.
            runs: source and destination of the elements.
            destination: 1-D, contiguous, in ordinary memory, of the array's dtype.
            on_read: called with the begin and the end of each contiguous part of `destination` that has just been read.

        Raises:
            UnreadableCheckpointError: the file is damaged or too short; some elements may have been written.
        """
        memory = bytes_of(destination)
        size = location.dtype.itemsize
        runs = runs if on_read is None else split_runs(runs, _SHOWN_BYTES // size)
        for source, target, length, count, source_stride, target_stride in runs:
            offset = location.offset + source * size
            begin = target * size
            row_bytes = length * size
            skip = source_stride * size
            step = target_stride * size
            if count == 1:
                self._reader.read_into(location.file, offset, memory[begin : begin + row_bytes])
            elif _are_scattered(row_bytes, skip - row_bytes):
                self._scatter(location.file, offset, skip - row_bytes, _rows_in(memory, begin, step, row_bytes, count))
            elif row_bytes < _LONG_ROW_BYTES and are_read_together(length, count, source_stride, size):
                run = target, length, count, source_stride, target_stride
                self._read_with_gaps(location.file, offset, memory, size, run)
            else:
                self._reader.read_rows(location.file, offset, skip, _rows_in(memory, begin, step, row_bytes, count))
            if on_read is not None and (count == 1 or target_stride == length):
                on_read(target, target + count * length)

    def _scatter(self, file: str, offset: int, gap: int, rows: Iterator[memoryview]) -> None:
        """Read rows that are `gap` bytes apart, many per call."""
        skipped = self._thread_buffer(gap)[:gap] if gap else None
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            buffers = batch if skipped is None else [buffer for row in batch for buffer in (row, skipped)][:-1]
            self._reader.scatter(file, offset, buffers)
            offset += len(batch) * (len(batch[0]) + gap)

    def _read_with_gaps(
        self, file: str, offset: int, memory: memoryview, size: int, run: tuple[int, int, int, int, int]
    ) -> None:
        """Read rows together with the gaps between them, and copy the rows; elements have `size` bytes."""
        target, length, count, source_stride, target_stride = run
        at_once = max(1, _SCRATCH_BYTES // (source_stride * size))
        scratch = self._thread_buffer(at_once * source_stride * size)
        element = f"i{size}"
        for row in range(0, count, at_once):
            rows = min(at_once, count - row)
            span = ((rows - 1) * source_stride + length) * size
            self._reader.read_into(file, offset + row * source_stride * size, scratch[:span])
            # numpy, because torch would start threads on all processors for these few bytes.
            source = numpy.ndarray((rows, length), element, scratch, 0, (source_stride * size, size))
            begin = (target + row * target_stride) * size
            rows_in_memory = numpy.ndarray((rows, length), element, memory, begin, (target_stride * size, size))
            numpy.copyto(rows_in_memory, source)

    def _thread_buffer(self, nbytes: int) -> memoryview:
        """Return a buffer of this thread, which is reused so that the system need not clear new pages."""
        buffer: memoryview | None = getattr(self._scratch, "memory", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._scratch.memory = memoryview(bytearray(max(nbytes, _SCRATCH_BYTES)))
        return buffer


def ranges_of(read: PlannedRead, location: TensorLocation) -> Iterator[FileRange]:
    """Yield the ranges of a file that a read needs, to request them ahead.

    Rows that share blocks of a store are one range, with the gaps between them. None of a quantized or reordered array,
    of which other elements are read as well.
    """
    size = location.dtype.itemsize
    for source, _, length, count, stride, _ in read.runs.rows() if is_plain(read, location) else ():
        begin = location.offset + source * size
        if stride * size <= STORE_BLOCK_BYTES:
            yield location.file, begin, ((count - 1) * stride + length) * size
        else:
            yield from ((location.file, begin + row * stride * size, length * size) for row in range(count))


def are_read_together(length: int, count: int, stride: int, size: int) -> bool:
    """Return whether rows of `length` elements, `stride` elements apart, are read in one piece.

    An element has `size` bytes.
    """
    return count > 1 and 0 <= (stride - length) * size <= _MOST_GAP_BYTES


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())


def _are_scattered(row_bytes: int, gap: int) -> bool:
    """Return whether rows that lie `gap` bytes apart are read many per call."""
    if gap == 0:
        return row_bytes > _SHORT_ROW_BYTES
    return row_bytes >= _LONG_ROW_BYTES and 0 < gap <= min(row_bytes, _MOST_SKIPPED_BYTES)


def _rows_in(memory: memoryview, begin: int, step: int, row_bytes: int, count: int) -> Iterator[memoryview]:
    """Return the memory of `count` rows, `step` bytes apart."""
    return (memory[place : place + row_bytes] for place in (begin + row * step for row in range(count)))
