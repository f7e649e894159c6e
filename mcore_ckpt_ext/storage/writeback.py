"""Starts writing bytes to the disk early, so that the flush at the end has little left to wait for.

By default Linux keeps written bytes in memory for up to 30 seconds (`/proc/sys/vm/dirty_expire_centisecs`).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_WRITE = 2  # SYNC_FILE_RANGE_WRITE, sync_file_range(2): start, do not wait


def begin_to_flush(descriptor: int, position: int, count: int) -> None:
    """Start writing a byte range of a file to the disk; a flush is still needed, and reports errors.

    Args:
        descriptor: descriptor of the open file.
        position: first byte.
        count: number of bytes.
    """
    if (call := function_of_linux("sync_file_range")) is not None:
        call(descriptor, ctypes.c_int64(position), ctypes.c_int64(count), _WRITE)


@cache
def function_of_linux(name: str) -> Any:
    """Return a function of Linux's C library; None on other systems, or if it has none."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
