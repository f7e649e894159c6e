"""Bytes begin their way to the disk while more are made: a flush at the end then has little left to wait for.

Linux by itself leaves them in memory for up to half a minute (`/proc/sys/vm/dirty_expire_centisecs`).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_WRITE = 2  # SYNC_FILE_RANGE_WRITE, sync_file_range(2): begin, and do not wait


def begin_to_flush(descriptor: int, position: int, count: int) -> None:
    """Have the system write a stretch of a file to the disk; a flush is needed all the same, and tells what went wrong.

    Args:
        descriptor: of the open file.
        position: first byte.
        count: number of bytes.
    """
    if (call := _sync_file_range()) is not None:
        call(descriptor, ctypes.c_int64(position), ctypes.c_int64(count), _WRITE)


@cache
def _sync_file_range() -> Any:
    """The system's function; None where it has none."""
    return getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform.startswith("linux") else None
