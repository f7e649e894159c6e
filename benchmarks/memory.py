"""Brings memory and page cache into the state that they have right after use.

The host of a virtual machine reclaims memory that was not used recently, and the first access afterwards costs more
than everything else. A system may also evict files that were not read for some seconds.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_BLOCK = 16 << 20


def touch(count: int) -> None:
    """Use this number of bytes of memory, and free them."""
    if count:
        with fresh(count) as memory:
            for page in range(0, count, mmap.PAGESIZE):
                memory[page] = 1


def fresh(count: int) -> mmap.mmap:
    """Allocate private memory, like that of a program; memory that processes can share costs a third more."""
    return mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def remember(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Read the files of a folder into the page cache; this process reads one of several parts."""
    block = memoryview(bytearray(_BLOCK))
    for path in files_of(folder):
        descriptor, size = os.open(path, os.O_RDONLY), path.stat().st_size
        for start in range(part * _BLOCK, size, parts * _BLOCK):
            os.preadv(descriptor, [block], start)
        os.close(descriptor)


def forget(folder: Path) -> None:
    """Evict the files of a folder from the page cache, without privileges; the disk's own cache may keep them."""
    for path in files_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # data that is not on disk cannot be evicted
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def files_of(folder: Path) -> list[Path]:
    """Return all files below a folder, in the order of their paths."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def bytes_of(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in files_of(folder))
