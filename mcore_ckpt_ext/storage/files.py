"""Positioned reads from the files of one checkpoint folder.

`pread` instead of `mmap`: it writes straight into the destination's memory, a file that shrinks while it is
read is an error and not a SIGBUS that kills the job, the pages do not count as this process's memory, and the
bytes can be counted exactly.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType

from mcore_ckpt_ext.errors import INTERRUPTED, UnreadableCheckpointError, io_hint
from mcore_ckpt_ext.storage.checked_files import open_file
from mcore_ckpt_ext.storage.crc32 import crc32

# A zarr array has a file for each chunk, and a process may by default open 1024 files.
_OPEN_FILES = 256
# What one call of preadv(2) takes: IOV_MAX of Linux.
_MOST_BUFFERS = 1024
_CHECKSUM_BLOCK = 1 << 19  # what a processor's own cache holds


class _Descriptor:
    """An open file; it is closed when nobody holds it any more, so that a reader in another thread may finish."""

    def __init__(self, folder: Path, name: str) -> None:
        self.number = -1
        self.number = open_file(folder, name)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def cut_short(where: object, found: int, needed: int) -> UnreadableCheckpointError:
    """The refusal of a file that ends after `found` bytes where the metadata needs `needed`."""
    return UnreadableCheckpointError(
        "a file of the checkpoint is shorter than its metadata says",
        found=f"{found} bytes",
        expected=f"at least {needed} bytes",
        where=str(where),
        hint=INTERRUPTED,
    )


class FolderReader:
    """Reads byte ranges of the files below one folder; the latest files stay open; safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._descriptors: OrderedDict[str, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._descriptors.clear()

    def size(self, file: str) -> int:
        """Size of a file in bytes.

        Raises:
            UnreadableCheckpointError: it is missing or cannot be opened.
        """
        return os.fstat(self._descriptor(file).number).st_size

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) from `offset` of `file`.

        Raises:
            UnreadableCheckpointError: the file is missing, or ends too early.
        """
        descriptor = self._descriptor(file)
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(descriptor.number, [buffer[done:]], offset + done)
            except (OSError, OverflowError) as error:
                raise UnreadableCheckpointError(
                    "a file of the checkpoint cannot be read",
                    found=f"{error} at byte {offset + done}",
                    where=str(self.folder / file),
                ) from error
            if count == 0:
                raise cut_short(self.folder / file, os.fstat(descriptor.number).st_size, offset + len(buffer))
            done += count
        with self._lock:
            self.bytes_read += done

    def read_rows(self, file: str, offset: int, stride: int, rows: Iterable[memoryview]) -> None:
        """Fill each of many small buffers, the next from `stride` bytes further on; errors as in `read_into`."""
        descriptor, done = self._descriptor(file), 0
        for row in rows:
            try:
                count = os.preadv(descriptor.number, (row,), offset)
            except (OSError, OverflowError):
                count = 0  # what is wrong shows again below
            if count < len(row):
                self.read_into(file, offset + count, row[count:])
            done += count
            offset += stride
        with self._lock:
            self.bytes_read += done

    def scatter(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill several buffers, one after the other, with what follows `offset`; errors as in `read_into`."""
        for first in range(0, len(buffers), _MOST_BUFFERS):
            some = buffers[first : first + _MOST_BUFFERS]
            wanted = sum(map(len, some))
            descriptor = self._descriptor(file)
            try:
                count = os.preadv(descriptor.number, some, offset)
            except (OSError, OverflowError):
                count = 0  # what is wrong shows again below
            with self._lock:
                self.bytes_read += count
            if count < wanted:
                self._fill_rest(file, offset, some, count)
            offset += wanted

    def _fill_rest(self, file: str, offset: int, buffers: Sequence[memoryview], done: int) -> None:
        """Fill buffers of which the first `done` bytes are there."""
        for buffer in buffers:
            have = min(done, len(buffer))
            if have < len(buffer):
                self.read_into(file, offset + have, buffer[have:])
            offset, done = offset + len(buffer), done - have

    def read(self, file: str, offset: int, count: int) -> bytes:
        """Read `count` bytes; errors as in `read_into`."""
        buffer = bytearray(count)
        self.read_into(file, offset, memoryview(buffer))
        return bytes(buffer)

    def checksum(self, file: str, offset: int, count: int) -> int:
        """The CRC-32 of `count` bytes; errors as in `read_into`."""
        memory = memoryview(bytearray(min(_CHECKSUM_BLOCK, count)))
        crc, done = 0, 0
        while done < count:
            block = memory[: count - done]
            self.read_into(file, offset + done, block)
            crc = crc32(block, crc)
            done += len(block)
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
        path = checked_name(file, self.folder)
        try:
            return _Descriptor(self.folder, str(path))
        except OSError as error:
            raise UnreadableCheckpointError(
                "a file of the checkpoint cannot be opened",
                found=error.strerror,
                where=str(self.folder / path),
                hint=io_hint(error),
            ) from error


def checked_name(file: str, folder: Path) -> PurePosixPath:
    """The relative path of a file of a checkpoint.

    Raises:
        UnreadableCheckpointError: it leads out of the checkpoint's folder.
    """
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts:
        raise UnreadableCheckpointError(
            "the checkpoint's metadata points outside of its own folder", found=file, where=str(folder)
        )
    return path


class Window:
    """A read-only, seekable view of `length` bytes, for libraries that want a file object.

    `read`: given a position and a count, these bytes.
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self._read, self._length = read, length
        self._position = 0

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position in the window."""
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position in the window, like `io.IOBase.seek`."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + position)
        return self._position

    def read(self, count: int = -1) -> bytes:
        """Read up to `count` bytes, to the end of the window when negative."""
        left = max(0, self._length - self._position)
        count = left if count < 0 else min(count, left)
        data = self._read(self._position, count)
        self._position += count
        return data
