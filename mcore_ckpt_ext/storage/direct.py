"""Writes files past the page cache, whose memory allocation costs several times the write itself.

A page of the cache must be found, cleared and, on a virtual machine, provided by the host, before a byte is copied to
it. A direct write (`O_DIRECT`, open(2)) goes from the caller's memory to the disk. Space is reserved first, because
ext4 lets only one thread at a time write to a file whose blocks are not allocated yet (`ext4_dio_write_checks`,
fs/ext4/file.c, Linux 5.8 to 6.18).

Direct and cached writes go to one file, but never to the same aligned `ALIGNMENT` bytes. No cache page and no file
system block is larger, so neither kind of write can overwrite the other. A flush is still needed for metadata and the
disk's own cache (open(2)).

A cached write waits until no direct write to its file is under way, and others wait for it (the inode's lock,
`ext4_buffered_write_iter` and `ext4_dio_write_iter`, fs/ext4/file.c). So the few bytes at the unaligned ends of blocks
are held in memory, and written together.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading

from mcore_ckpt_ext.storage.direct_reads import DirectDescriptor, DirectReads
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.storage.writeback import begin_to_flush, function_of_linux

ALIGNMENT = 1 << 16
"""The alignment of file positions and memory in bytes: the largest page and block size of Linux today."""
# For fewer bytes, waiting for the disk in each call costs more than the cache, and starting a flush more than it saves.
_WORTH = 1 << 20
_HELD_BYTES = 16 << 20
"""The most bytes of a file that are held in memory before they are written."""
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class BlockFile:
    """A file that is written block by block, from several threads if needed. All methods raise OSError."""

    def __init__(self, folder: Folder, name: str) -> None:
        """Open a file that already has its full size."""
        self._folder = folder
        self._name = name
        self.descriptor = folder.open(name, os.O_RDWR)
        self._direct: int | None = None
        self._is_tried = False
        self._direct_to_read = DirectDescriptor(self.descriptor)
        self._lock = threading.Lock()
        self._held: list[tuple[int, bytes]] = []
        self._held_bytes = 0

    def close(self) -> None:
        """Close the file without writing what is held; `write_held` first."""
        self._direct_to_read.close()
        for descriptor in (self.descriptor, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def read_block(self, buffer: memoryview, position: int, reads: DirectReads) -> int:
        """Fill a buffer from a position, past the page cache where possible; by one thread.

        Returns:
            The number of bytes, which is smaller only at the end of the file.
        """
        direct = self._direct_to_read.number()
        done = 0 if direct is None else reads.read_into(self.descriptor, direct, position, buffer)
        while done < len(buffer) and (count := os.preadv(self.descriptor, [buffer[done:]], position + done)):
            done += count
        return done

    def write(self, data: memoryview, position: int) -> None:
        """Write a few bytes, at the latest in `write_held`."""
        with self._lock:
            self._held.append((position, bytes(data)))
            self._held_bytes += len(data)
            is_much = self._held_bytes > _HELD_BYTES
        if is_much:
            self.write_held()

    def write_held(self) -> None:
        """Write what is held in memory."""
        with self._lock:
            held = self._held
            self._held = []
            self._held_bytes = 0
        for position, data in held:
            write_all(self.descriptor, memoryview(data), position)

    def write_block(self, data: memoryview, position: int, address: int) -> None:
        """Write a block of bytes: directly if its memory `address` is aligned like its position."""
        begin = -(-position // ALIGNMENT) * ALIGNMENT - position
        end = len(data)
        end -= (position + end) % ALIGNMENT
        done = 0
        if end - begin >= _WORTH and (address - position) % ALIGNMENT == 0:
            direct = self._direct_descriptor()
            if direct is not None:
                self._write_cached(data[:begin], position)
                done = begin + self._write_direct(direct, data[begin:end], position + begin)
        self._write_cached(data[done:], position + done)

    def _write_cached(self, data: memoryview, position: int) -> None:
        if len(data) < _WORTH:
            self.write(data, position)
        else:
            write_all(self.descriptor, data, position)
            begin_to_flush(self.descriptor, position, len(data))

    def _write_direct(self, descriptor: int, data: memoryview, position: int) -> int:
        """Write as many bytes directly as the system accepts, and return their number."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], position + done)
        except OSError as error:
            # The system refuses the alignment, perhaps after a short write: the rest is written through the cache.
            if error.errno not in _NO_DIRECT:
                raise
        return done

    def _direct_descriptor(self) -> int | None:
        with self._lock:
            if not self._is_tried:
                self._is_tried = True
                _reserve(self.descriptor)
                self._direct = self._open()
            return self._direct

    def _open(self) -> int | None:
        if not hasattr(os, "O_DIRECT"):
            return None
        try:
            return self._folder.open(self._name, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            return None


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write all bytes to a file at a position.

    Raises:
        OSError: writing fails.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)


def _reserve(descriptor: int) -> None:
    """Allocate the blocks of a file; if this fails, later writes allocate them and report errors.

    `os.posix_fallocate` would write to every block on file systems that cannot allocate.
    """
    if (call := function_of_linux("fallocate64")) is not None:
        call(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(os.fstat(descriptor).st_size))
