"""Writes that bypass the page cache: memory that the cache would take anew costs several times what writing costs.

A page of the cache has to be found, cleared and, on a virtual machine, given by the host, before a byte is copied to
it. A direct write (`O_DIRECT`, open(2)) goes from the block that was filled to the disk. Space is reserved before,
because ext4 lets only one thread at a time write to a file where blocks have to be allocated (`ext4_dio_write_checks`,
fs/ext4/file.c, Linux 5.8 to 6.18).

Both kinds of writes go to one file, but never to the same `ALIGNMENT` bytes: no page of the cache, and no block of a
file system, is larger, so neither write can undo the other. A flush is needed all the same (open(2): metadata, and the
cache of the disk).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from functools import cache
from typing import Any

from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.storage.writeback import begin_to_flush

ALIGNMENT = 1 << 16
"""Of positions in the file and of memory; the largest pages and blocks that Linux offers today."""
# Below, the wait for the disk at each call costs more than the cache.
_WORTH = 1 << 20
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class BlockFile:
    """A file that is filled block by block; safe to use from several threads. All methods raise OSError."""

    def __init__(self, folder: Folder, name: str) -> None:
        """Open a file that was made at its full size."""
        self._folder, self._name = folder, name
        self.descriptor = folder.open(name, os.O_RDWR)
        self._direct: int | None = None
        self._is_tried = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close it."""
        for descriptor in (self.descriptor, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def write(self, data: memoryview, position: int) -> None:
        """Write a few bytes."""
        write_all(self.descriptor, data, position)

    def write_block(self, data: memoryview, position: int, address: int) -> None:
        """Write a block of bytes, given the address of its memory: directly if that fits the position."""
        begin, end = -(-position // ALIGNMENT) * ALIGNMENT - position, len(data)
        end -= (position + end) % ALIGNMENT
        done = 0
        if end - begin >= _WORTH and (address - position) % ALIGNMENT == 0:
            direct = self._direct_descriptor()
            if direct is not None:
                self._write_cached(data[:begin], position)
                done = begin + self._write_direct(direct, data[begin:end], position + begin)
        self._write_cached(data[done:], position + done)

    def _write_cached(self, data: memoryview, position: int) -> None:
        write_all(self.descriptor, data, position)
        begin_to_flush(self.descriptor, position, len(data))

    def _write_direct(self, descriptor: int, data: memoryview, position: int) -> int:
        """Write as much as can be written directly, and return how many bytes that is."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], position + done)
        except OSError as error:
            # The system refuses the alignment, here or behind a short write: the cache takes the rest.
            if error.errno not in _NO_DIRECT:
                raise
        return done

    def _direct_descriptor(self) -> int | None:
        with self._lock:
            if not self._is_tried:
                self._is_tried = True
                _reserve(self.descriptor)
                self._direct = self._opened()
            return self._direct

    def _opened(self) -> int | None:
        if not hasattr(os, "O_DIRECT"):
            return None
        try:
            return self._folder.open(self._name, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            return None


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write bytes to a file.

    Raises:
        OSError: the disk refuses.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)


def _reserve(descriptor: int) -> None:
    """Have the blocks of a file allocated; where that is refused, writes allocate them, and say what is wrong."""
    if (call := _fallocate()) is not None:
        call(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(os.fstat(descriptor).st_size))


@cache
def _fallocate() -> Any:
    """The system's function, not `os.posix_fallocate`: that writes to every block where the file system has none."""
    return getattr(ctypes.CDLL(None), "fallocate64", None) if sys.platform.startswith("linux") else None
