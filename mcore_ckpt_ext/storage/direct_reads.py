"""Reads large blocks of files past the page cache, unless they are in it.

Providing pages of the cache takes most of the processor time of a read from the disk, and evicts what other processes
of the machine have read. A direct read (`O_DIRECT`, open(2)) goes from the disk to the caller's memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from mcore_ckpt_ext.lazy_torch import numpy
from mcore_ckpt_ext.storage.huge_pages import huge_memory
from mcore_ckpt_ext.storage.writeback import function_of_linux

WORTH = 1 << 19
"""Fewer bytes are read through the page cache, whose read-ahead spares them the wait for the disk."""
_STEP = 4 << 20
"""The largest blocks of `verify` and `diff`. With another page, such a block is one read wherever it begins: a second
one, for its last bytes, would wait until the disk has served the blocks of other threads."""
_PAGE = mmap.PAGESIZE  # a multiple of the block size of a disk


class DirectReads:
    """Reads blocks of files directly, through memory of each thread; it is thread-safe."""

    def __init__(self) -> None:
        self._own = threading.local()

    def read_into(self, descriptor: int, direct: int, offset: int, buffer: memoryview) -> int:
        """Fill the beginning of `buffer` with the bytes from `offset` that are not in the page cache.

        Args:
            descriptor: the open file.
            direct: another descriptor of the same file, opened with `O_DIRECT`.
            offset: the position of the first byte.
            buffer: where to put the bytes.

        Returns:
            The number of bytes read. The caller reads the rest through the page cache: bytes that are in it, and
            those that the system does not read directly, for whatever reason.
        """
        size = os.fstat(descriptor).st_size
        places = numpy.frombuffer(buffer, numpy.uint8)
        done = 0
        while len(buffer) - done >= WORTH:
            begin = (offset + done) // _PAGE * _PAGE
            skip = offset + done - begin
            needed = min(len(self._block()), skip + len(buffer) - done)
            middle = begin + needed // 2 // _PAGE * _PAGE
            if begin + needed > size or _is_cached(descriptor, middle):
                break
            try:
                count = os.preadv(direct, [self._block()[: -(-needed // _PAGE) * _PAGE]], begin)
            except OSError:
                break  # if there is an error to report, reading through the cache reports it
            count = min(count, needed) - skip
            if count <= 0:
                break
            # numpy copies without the lock of the interpreter.
            numpy.copyto(places[done : done + count], self._block()[skip : skip + count])
            done += count
        return done

    def _block(self) -> numpy.ndarray:
        if not hasattr(self._own, "block"):
            self._own.block = huge_memory(_STEP + _PAGE)
        block: numpy.ndarray = self._own.block
        return block


class DirectDescriptor:
    """Another descriptor of an open file, for direct reads, which is opened when it is first needed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._direct: int | None = None
        self._is_tried = False

    def number(self) -> int | None:
        """Return the descriptor; None if there are no direct reads. By one thread at a time."""
        if not self._is_tried:
            self._is_tried = True
            self._direct = open_direct(self._descriptor)
        return self._direct

    def close(self) -> None:
        """Close the descriptor if it has been opened."""
        if self._direct is not None:
            os.close(self._direct)


def open_direct(descriptor: int) -> int | None:
    """Open an open file once more, for direct reads.

    Its name is not used again: another file may have it by now.

    Returns:
        A descriptor; None if the system or the file system has no direct reads.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def _is_cached(descriptor: int, position: int) -> bool:
    """Return whether the page at a position of a file is in the page cache.

    The page is mapped for that, but not touched. `mincore` says so of all pages if the file belongs to someone else and
    cannot be written (mm/mincore.c, `can_do_mincore`, Linux 5.2 to 6.18).
    """
    call = function_of_linux("mincore")
    if call is None:
        return True
    state = ctypes.c_ubyte(1)
    try:
        with mmap.mmap(descriptor, _PAGE, access=mmap.ACCESS_COPY, offset=position) as page:
            place = ctypes.addressof(ctypes.c_ubyte.from_buffer(page))
            call(ctypes.c_void_p(place), ctypes.c_size_t(_PAGE), ctypes.byref(state))
    except (OSError, ValueError):
        return True  # a file system without mappings, or a file that has just become shorter
    return bool(state.value & 1)
