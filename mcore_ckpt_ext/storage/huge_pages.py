"""Allocates memory for direct I/O in huge pages.

A request to a disk has a limited number of segments, and each page that is not adjacent in memory is one
(`queue/max_segments` in sysfs: 254 of 4 KiB are one MiB). From small pages, direct I/O of large blocks takes two to
three times as long.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

from mcore_ckpt_ext.lazy_torch import numpy

_HUGE_BYTES = 2 << 20
"""The size of a huge page of x86-64, and of Arm with small pages of 4 KiB."""


def huge_memory(nbytes: int) -> numpy.ndarray:
    """Allocate zeroed bytes, in huge pages where the system provides them (madvise(2))."""
    reserved = mmap.mmap(-1, nbytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            reserved.madvise(mmap.MADV_HUGEPAGE)
    memory = numpy.frombuffer(reserved, numpy.uint8)
    begin = -memory.ctypes.data % _HUGE_BYTES
    return memory[begin : begin + nbytes]
