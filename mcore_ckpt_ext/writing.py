"""Executes outputs: fills the records of the files being made, block by block, in bounded memory."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from mcore_ckpt_ext.planning.output import Block, OutputFile, Record
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.crc32 import Piece, checksum, crc32
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.storage.publish import cannot_write
from mcore_ckpt_ext.storage.writeback import begin_to_flush

BLOCK_BYTES = 64 << 20

FillBlock = Callable[[Record, Block, torch.Tensor], Sequence[Piece] | None]
"""Fills a 1-D tensor, one element for each of the block, with the block's content; the gaps are zero already.

What it answers with are pieces of the block, in bytes, whose checksums are known.
"""


def lay_out(files: Iterable[OutputFile], folder: Folder) -> None:
    """Make files at their full size, with the bytes that are known already.

    Raises:
        DestinationError: the disk refuses.
    """
    for file in files:
        _lay_out_file(file, folder)


def _lay_out_file(file: OutputFile, folder: Folder) -> None:
    try:
        # An interrupted run may have left it: the contents of its records stay.
        descriptor = folder.open(file.name, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(descriptor, file.length)
            for position, data in file.literals:
                _write(descriptor, memoryview(data), position)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise cannot_write(folder.path / file.name, error) from error


class RecordWriter:
    """Fills records of the files below one folder, several at a time."""

    def __init__(self, folder: Folder, fill: FillBlock, workers: int, block_bytes: int = BLOCK_BYTES) -> None:
        self._folder = folder
        self._fill = fill
        self._workers = workers
        self._block_bytes = block_bytes
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._memory = threading.local()

    def write(
        self, records: Sequence[tuple[int, Record]], finished: Callable[[int, int], None], moved: Callable[[int], None]
    ) -> None:
        """Fill numbered records.

        Args:
            records: what to fill.
            finished: told the number and the CRC-32 of every finished record.
            moved: told the bytes of every finished block.

        Raises:
            DestinationError: the disk refuses.
            CheckpointError: whatever the source raises; no other record is begun after that.
        """
        stop = threading.Event()

        def one(number: int, record: Record) -> None:
            if not stop.is_set():
                try:
                    crc = self._write_record(record, moved, stop)
                except BaseException:
                    stop.set()
                    raise
                if crc is not None:
                    finished(number, crc)

        with ExitStack() as stack:
            stack.callback(self._close)
            pool = stack.enter_context(ThreadPoolExecutor(self._workers, thread_name_prefix="mcore_ckpt_ext"))
            for done in [pool.submit(one, number, record) for number, record in records]:
                done.result()

    def confirm(self, record: Record, expected: int) -> bool:
        """Whether a record that an earlier run finished holds what it held then, by its CRC-32.

        Its checksums in the file are written again: laying out the files anew has cleared them.
        """
        crc, size = 0, ITEM_SIZE[record.dtype]
        for block in record.blocks(self._block_bytes):
            position = record.offset + block.start * size
            crc = crc32(os.pread(self._descriptor(record.file), (block.stop - block.start) * size, position), crc)
        if crc == expected:
            self._write_checksums(record, crc)
        return crc == expected

    def _write_record(self, record: Record, moved: Callable[[int], None], stop: threading.Event) -> int | None:
        """The record's CRC-32; None where another record's failure stopped it."""
        crc, size = 0, ITEM_SIZE[record.dtype]
        try:
            descriptor = self._descriptor(record.file)
            for block in record.blocks(self._block_bytes):
                if stop.is_set():
                    return None
                elements = self._room(record, block)
                known = self._fill(record, block, elements)
                data = memoryview(elements.view(torch.uint8).numpy())
                crc = checksum(data, known or (), crc)
                position = record.offset + block.start * size
                _write(descriptor, data, position)
                begin_to_flush(descriptor, position, len(data))
                moved(len(data))
        except OSError as error:
            raise cannot_write(self._folder.path / record.file, error) from error
        self._write_checksums(record, crc)
        return crc

    def _room(self, record: Record, block: Block) -> torch.Tensor:
        """This thread's memory for a block, the same for each: fresh pages cost more than what is read into them."""
        if not hasattr(self._memory, "bytes"):
            self._memory.bytes = torch.empty(max(self._block_bytes, 16), dtype=torch.uint8)
        count = block.stop - block.start
        room: torch.Tensor = self._memory.bytes[: count * ITEM_SIZE[record.dtype]].view(getattr(torch, record.dtype))
        if sum(placed.wanted.slice.numel for placed in block.content) < count:
            room.zero_()
        return room

    def _write_checksums(self, record: Record, crc: int) -> None:
        try:
            for place in record.checksums:
                _write(self._descriptor(record.file), memoryview(struct.pack("<I", crc)), place)
        except OSError as error:
            raise cannot_write(self._folder.path / record.file, error) from error

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = self._folder.open(file, os.O_RDWR)
            return self._descriptors[file]

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _write(descriptor: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)
