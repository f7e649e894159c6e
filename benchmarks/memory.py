"""Memory and page cache as they are right after use.

A virtual machine's host takes back what was not used lately, so that the first to use it again pays more for that than
for all else; and a system may page out files that nobody has read for some seconds.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_BLOCK = 16 << 20


def touch(count: int) -> None:
    """Use so many bytes of memory, and give them back."""
    if count:
        with fresh(count) as memory:
            for page in range(0, count, mmap.PAGESIZE):
                memory[page] = 1


def fresh(count: int) -> mmap.mmap:
    """So many bytes of memory as a program is given it: its own. (What processes could share costs a third more.)"""
    return mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def remember(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Have the page cache hold the files of a folder, of which this process reads one part of several."""
    block = memoryview(bytearray(_BLOCK))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        descriptor, size = os.open(path, os.O_RDONLY), path.stat().st_size
        for start in range(part * _BLOCK, size, parts * _BLOCK):
            os.preadv(descriptor, [block], start)
        os.close(descriptor)


def forget(folder: Path) -> None:
    """Have the page cache forget the files of a folder, which needs no privilege; the disk's own cache may not."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # what is not on the disk yet is not forgotten
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
