"""Reads byte ranges from the files of one checkpoint folder.

It uses `pread` instead of `mmap`: bytes go straight to their destination, a file that shrinks while it is read causes
an error and not a SIGBUS that kills the job, pages do not count as memory of this process, and the bytes read can be
counted exactly. Only the look whether pages are cached maps a file (`direct_reads`), and touches none of it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mcore_ckpt_ext.errors import INTERRUPTED, UnreadableCheckpointError, quantity, unreadable_file
from mcore_ckpt_ext.storage.checked_files import open_file, readable_sizes
from mcore_ckpt_ext.storage.crc32 import crc32
from mcore_ckpt_ext.storage.direct_reads import WORTH, DirectDescriptor, DirectReads
from mcore_ckpt_ext.storage.read_ahead import FileRange, Item

# A zarr array has a file for each chunk, and by default a process may open 1024 files. A command reads two folders at
# once, and each file through up to two descriptors.
_OPEN_FILES = 128
# Buffers per call of preadv(2): IOV_MAX of Linux.
_MOST_BUFFERS = 1024


class _Descriptor:
    """An open file, which is closed when the last thread drops its reference."""

    def __init__(self, folder: Path, name: str) -> None:
        self.number = -1
        self.number = open_file(folder, name)
        self.direct = DirectDescriptor(self.number)

    def __del__(self) -> None:
        if self.number >= 0:
            self.direct.close()
            os.close(self.number)


def cut_short(where: object, found: int, needed: int) -> UnreadableCheckpointError:
    """Return the error for a file of `found` bytes whose metadata requires `needed`."""
    return UnreadableCheckpointError(
        "a file of the checkpoint is shorter than its metadata says",
        found=quantity(found, "byte"),
        expected=f"at least {quantity(needed, 'byte')}",
        where=str(where),
        hint=INTERRUPTED,
    )


class FolderReader:
    """Reads byte ranges of the files below a folder, and keeps the last files open. It is thread-safe."""

    checksum_block = 1 << 19
    """Bytes that `checksum` reads at once: they fit the cache of a processor core."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._descriptors: OrderedDict[str, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()
        self._direct_reads: DirectReads | None = None

    def past_cache(self) -> FolderReader:
        """Return a reader of the same files for bytes that this machine needs once.

        It reads large blocks past the page cache. The ranks of a job do not: they read many bytes more than once. Both
        readers keep the same files open.
        """
        reader = FolderReader(self.folder)
        reader._descriptors = self._descriptors
        reader._lock = self._lock
        reader._direct_reads = DirectReads()
        return reader

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._descriptors.clear()

    def size(self, file: str) -> int:
        """Size of a file in bytes.

        Raises:
            UnreadableCheckpointError: the file is missing, or is refused for what it is.
            StorageError: the file cannot be opened.
        """
        return os.fstat(self._descriptor(file).number).st_size

    def sizes(self) -> dict[str, int]:
        """Return the sizes of files in bytes that are known without opening each: `size` opens the others."""
        with suppress(OSError):
            return readable_sizes(self.folder)
        return {}

    def read_ahead(self, items: Iterable[Item], ranges: Callable[[Item], Iterable[FileRange]]) -> Iterator[Item]:
        """Yield items in their order; of a remote folder, after requests for what the next ones read.

        Args:
            items: anything; taken one after the other, a few ahead.
            ranges: returns the ranges within their files that an item reads: the file, the first byte, the length. It
                is not called for a local folder. Its errors are raised.
        """
        return iter(items)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) from `offset` of `file`.

        Raises:
            UnreadableCheckpointError: the file is missing, or ends too early.
            StorageError: the file cannot be read, for example from a broken disk.
        """
        descriptor = self._descriptor(file)
        done = self._read_directly(descriptor, offset, buffer)
        while done < len(buffer):
            try:
                count = os.preadv(descriptor.number, [buffer[done:]], offset + done)
            except OSError as error:
                where = f"{self.folder / file}, byte {offset + done:,}"
                raise unreadable_file("a file of the checkpoint cannot be read", error, where) from error
            except OverflowError as error:
                raise UnreadableCheckpointError(
                    "the checkpoint's metadata names a byte that no file has",
                    found=f"{error} at byte {offset + done}",
                    where=str(self.folder / file),
                ) from error
            if count == 0:
                raise cut_short(self.folder / file, os.fstat(descriptor.number).st_size, offset + len(buffer))
            done += count
        with self._lock:
            self.bytes_read += done

    def _read_directly(self, descriptor: _Descriptor, offset: int, buffer: memoryview) -> int:
        if self._direct_reads is None or len(buffer) < WORTH:
            return 0
        with self._lock:
            direct = descriptor.direct.number()
        return 0 if direct is None else self._direct_reads.read_into(descriptor.number, direct, offset, buffer)

    def read_rows(self, file: str, offset: int, stride: int, rows: Iterable[memoryview]) -> None:
        """Fill many small buffers from positions `stride` bytes apart; raises as `read_into` does."""
        descriptor = self._descriptor(file)
        done = 0
        for row in rows:
            try:
                count = os.preadv(descriptor.number, (row,), offset)
            except (OSError, OverflowError):
                count = 0  # `read_into` below raises the error
            if count < len(row):
                self.read_into(file, offset + count, row[count:])
            done += count
            offset += stride
        with self._lock:
            self.bytes_read += done

    def scatter(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill several buffers with consecutive bytes from `offset` on; raises as `read_into` does."""
        for first in range(0, len(buffers), _MOST_BUFFERS):
            batch = buffers[first : first + _MOST_BUFFERS]
            nbytes = sum(map(len, batch))
            descriptor = self._descriptor(file)
            try:
                count = os.preadv(descriptor.number, batch, offset)
            except (OSError, OverflowError):
                count = 0  # `_fill_rest` below raises the error
            with self._lock:
                self.bytes_read += count
            if count < nbytes:
                self._fill_rest(file, offset, batch, count)
            offset += nbytes

    def _fill_rest(self, file: str, offset: int, buffers: Sequence[memoryview], done: int) -> None:
        """Fill the rest of buffers whose first `done` bytes have been read."""
        for buffer in buffers:
            have = min(done, len(buffer))
            if have < len(buffer):
                self.read_into(file, offset + have, buffer[have:])
            offset = offset + len(buffer)
            done = done - have

    def read(self, file: str, offset: int, count: int) -> bytes:
        """Read `count` bytes; raises as `read_into` does."""
        buffer = bytearray(count)
        self.read_into(file, offset, memoryview(buffer))
        return bytes(buffer)

    def checksum(self, file: str, offset: int, count: int) -> int:
        """Return the CRC-32 of `count` bytes; raises as `read_into` does."""
        memory = memoryview(bytearray(min(self.checksum_block, count)))
        blocks = (
            (file, start, min(len(memory), offset + count - start))
            for start in range(offset, offset + count, self.checksum_block)
        )
        crc = 0
        for _, start, length in self.read_ahead(blocks, lambda block: [block]):
            block = memory[:length]
            self.read_into(file, start, block)
            crc = crc32(block, crc)
        return crc

    def _descriptor(self, file: str) -> _Descriptor:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = self._open(file)
                if len(self._descriptors) > _OPEN_FILES:
                    self._descriptors.popitem(last=False)
            self._descriptors.move_to_end(file)
            return self._descriptors[file]

    def _open(self, file: str) -> _Descriptor:
        name = checked_name(file, self.folder)
        try:
            return _Descriptor(self.folder, name)
        except OSError as error:
            raise unreadable_file("a file of the checkpoint cannot be opened", error, self.folder / name) from error


def checked_name(file: str, folder: Path) -> str:
    """Check the relative path of a file of a checkpoint, and return it.

    Raises:
        UnreadableCheckpointError: the path leads out of the checkpoint's folder.
    """
    if file.startswith("/") or "\0" in file or ".." in file.split("/"):
        raise UnreadableCheckpointError(
            "the checkpoint's metadata points outside of its own folder", found=file, where=str(folder)
        )
    return file


class Window:
    """A read-only, seekable view of `length` bytes, for libraries that need a file object.

    `read` returns the bytes for a position and a count.
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self._read = read
        self._length = length
        self._position = 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the current position in the window."""
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position in the window, like `io.IOBase.seek`."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + position)
        return self._position

    def read(self, count: int = -1) -> bytes:
        """Read up to `count` bytes; a negative count reads to the end of the window."""
        left = max(0, self._length - self._position)
        count = left if count < 0 else min(count, left)
        data = self._read(self._position, count)
        self._position += count
        return data
