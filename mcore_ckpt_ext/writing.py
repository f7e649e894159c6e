"""Executes write plans: fills the records of output files block by block, in bounded memory."""

from __future__ import annotations

import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import TypeAlias

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.planning.write_plan import Block, OutputFile, Record
from mcore_ckpt_ext.storage.atomic_files import cannot_write
from mcore_ckpt_ext.storage.crc32 import Piece, crc32, crc32_from_pieces
from mcore_ckpt_ext.storage.direct import ALIGNMENT, BlockFile, write_all
from mcore_ckpt_ext.storage.direct_reads import DirectReads
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.storage.huge_pages import huge_memory

BLOCK_BYTES = 64 << 20
# The part of a record that a thread fills before it takes other work.
_STRETCH_BYTES = 64 << 20

FillBlock: TypeAlias = "Callable[[Record, Block, torch.Tensor], Sequence[Piece] | None]"
"""Fills a 1-D tensor, one element for each element of the block, with the block's content; gaps are zero already.

It returns the pieces of the block, in bytes, whose checksums are known, or None if there is none.
"""

ReadAhead: TypeAlias = "Callable[[Record, Iterable[Block]], Iterable[Block]]"


def lay_out(files: Iterable[OutputFile], folder: Folder) -> None:
    """Create files at their full size and write the bytes that are known already.

    Raises:
        DestinationError: writing failed.
    """
    for file in files:
        _lay_out_file(file, folder)


def _lay_out_file(file: OutputFile, folder: Folder) -> None:
    try:
        # An interrupted run may have left the file: keep the contents of its records.
        descriptor = folder.open(file.name, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(descriptor, file.length)
            for position, data in file.literals:
                write_all(descriptor, memoryview(data), position)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise cannot_write(folder.path / file.name, error) from error


class _Unfinished:
    """A record that is not completely written yet."""

    def __init__(self, record: Record, stretches: int) -> None:
        self.record = record
        self._left = stretches
        self._written: list[Piece] = []
        self._lock = threading.Lock()

    def add(self, start: int, stop: int, crc: int) -> int | None:
        """Record a written byte range and its CRC-32.

        Returns:
            The CRC-32 of the whole record after its last part, else None.
        """
        with self._lock:
            self._written.append((start, stop, crc))
            self._left -= 1
            return None if self._left else crc32_from_pieces(memoryview(b""), self._written)


class RecordWriter:
    """Fills records of the files below one folder with several threads.

    Args:
        folder: the folder.
        fill: fills a block.
        workers: the number of threads.
        block_bytes: the most bytes of a block.
        read_ahead: yields blocks of a record in their order, and may prepare `fill` for the next ones.
    """

    def __init__(
        self,
        folder: Folder,
        fill: FillBlock,
        workers: int,
        block_bytes: int = BLOCK_BYTES,
        read_ahead: ReadAhead = lambda record, blocks: blocks,
    ) -> None:
        self._folder = folder
        self._fill = fill
        self._read_ahead = read_ahead
        self._workers = workers
        self._block_bytes = block_bytes
        self._files: dict[str, BlockFile] = {}
        self._unfinished: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._memory = threading.local()
        self._direct_reads = DirectReads()

    def write(
        self, records: Sequence[tuple[int, Record]], finished: Callable[[int, int], None], moved: Callable[[int], None]
    ) -> None:
        """Fill numbered records.

        Args:
            records: the records to fill, with their numbers.
            finished: called with the number and the CRC-32 of every finished record.
            moved: called with the number of bytes of every finished block.

        Raises:
            DestinationError: writing failed.
            CheckpointError: the source raised it; no other block is begun after an error or an interrupt.
        """
        stop = threading.Event()
        self._unfinished = Counter(record.file for _, record in records)

        def one(number: int, whole: _Unfinished, begin: int, end: int) -> None:
            if not stop.is_set():
                try:
                    crc = self._write_stretch(whole, begin, end, moved, stop)
                except BaseException:
                    stop.set()
                    raise
                if crc is not None:
                    finished(number, crc)

        with ExitStack() as stack:
            stack.callback(self._close)
            # One thread of torch in each of these threads: more would spin while they wait for each other. The number
            # that one thread sets applies to all threads that start later.
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            pool = ThreadPoolExecutor(self._workers, "mcore_ckpt_ext", torch.set_num_threads, (1,))
            stack.enter_context(pool)
            # Called before the pool waits for its threads: only the waiting thread receives an interrupt.
            stack.callback(stop.set)
            for _ in pool.map(lambda stretch: one(*stretch), self._stretches(records)):
                pass

    def _stretches(self, records: Sequence[tuple[int, Record]]) -> Iterator[tuple[int, _Unfinished, int, int]]:
        """Split large records into parts, so that the last record does not occupy a single thread."""
        for number, record in records:
            step = record.step(self._block_bytes)
            step *= max(1, _STRETCH_BYTES // (step * ITEM_SIZE[record.dtype]))
            begins = range(0, record.numel, step) or range(1)
            whole = _Unfinished(record, len(begins))
            yield from ((number, whole, begin, min(begin + step, record.numel)) for begin in begins)

    def confirm(self, record: Record, expected: int) -> bool:
        """Return True if a record that an earlier run finished still has the CRC-32 that it had then.

        The record's checksums in the file are written again, because `lay_out` has cleared them.

        Raises:
            DestinationError: reading or writing failed.
        """
        crc = 0
        size = ITEM_SIZE[record.dtype]
        try:
            with closing(BlockFile(self._folder, record.file)) as file:
                for block in record.blocks(self._block_bytes):
                    position = record.offset + block.start * size
                    data = memoryview(self._room(record, block).view(torch.uint8).numpy())
                    count = file.read_block(data, position, self._direct_reads)
                    crc = crc32(data[:count], crc)
                if crc == expected:
                    _write_checksums(file, record, crc)
                    file.write_held()
        except OSError as error:
            raise cannot_write(self._folder.path / record.file, error) from error
        return crc == expected

    def _write_stretch(
        self, whole: _Unfinished, begin: int, end: int, moved: Callable[[int], None], stop: threading.Event
    ) -> int | None:
        """Write a part of a record.

        Returns:
            The record's CRC-32 if this was its last part; None if other parts are left or another thread's error
            stopped it.
        """
        record = whole.record
        crc = 0
        size = ITEM_SIZE[record.dtype]
        try:
            file = self._file(record.file)
            for block in self._read_ahead(record, record.blocks(self._block_bytes, begin, end)):
                if stop.is_set():
                    return None
                elements = self._room(record, block)
                pieces = self._fill(record, block, elements)
                data = memoryview(elements.view(torch.uint8).numpy())
                crc = crc32_from_pieces(data, pieces or (), crc)
                position = record.offset + block.start * size
                file.write_block(data, position, elements.data_ptr())
                moved(len(data))
            record_crc = whole.add(begin * size, end * size, crc)
            if record_crc is not None:
                _write_checksums(file, record, record_crc)
                self._close_if_whole(record.file)
        except OSError as error:
            raise cannot_write(self._folder.path / record.file, error) from error
        return record_crc

    def _room(self, record: Record, block: Block) -> torch.Tensor:
        """Return this thread's reused memory for a block: new pages would cost more than reading into them.

        The memory has the same alignment as the block's position in the file, as direct writes require.
        """
        if not hasattr(self._memory, "bytes"):
            self._memory.bytes = torch.from_numpy(huge_memory(max(self._block_bytes, 16) + 2 * ALIGNMENT))
        count = block.stop - block.start
        size = ITEM_SIZE[record.dtype]
        position = record.offset + block.start * size
        # Memory that is not aligned to its elements cannot be viewed as a tensor of them.
        shift = (position - self._memory.bytes.data_ptr()) % ALIGNMENT if position % size == 0 else 0
        memory = self._memory.bytes[shift : shift + count * size]
        room: torch.Tensor = memory.view(getattr(torch, record.dtype))
        if sum(placed.wanted.slice.numel for placed in block.content) < count:
            room.zero_()
        return room

    def _file(self, name: str) -> BlockFile:
        with self._lock:
            if name not in self._files:
                self._files[name] = BlockFile(self._folder, name)
            return self._files[name]

    def _close_if_whole(self, name: str) -> None:
        """Close a file when its last record is finished: a process may open fewer files than a job has ranks."""
        with self._lock:
            self._unfinished[name] -= 1
            whole = None if self._unfinished[name] else self._files.pop(name)
        if whole is not None:
            with closing(whole):
                whole.write_held()

    def _close(self) -> None:
        """Close files that an error has left unfinished; a later run continues with their finished records."""
        while self._files:
            with closing(self._files.popitem()[1]) as file, suppress(OSError):
                file.write_held()


def _write_checksums(file: BlockFile, record: Record, crc: int) -> None:
    for place in record.checksums:
        file.write(memoryview(struct.pack("<I", crc)), place)
    for place in record.checksum_texts:
        file.write(memoryview(f"{crc:08x}".encode()), place)
