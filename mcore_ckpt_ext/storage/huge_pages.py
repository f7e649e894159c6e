"""Memory that is touched for the first time by what is read into it: in large pages, the system finds it much faster.

Clearing and mapping 4 KiB at a time costs more than reading them from the page cache. Where huge pages are given to who
asks for them (`/sys/kernel/mm/transparent_hugepage/enabled`: madvise, as distributions set it), one has to ask.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

import torch

_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE = 1 << 21


def ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for them, for a large tensor on the processor; it is no matter if the system has none."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes < 2 * _HUGE or tensor.device.type != "cpu" or (advise := _madvise()) is None:
        return
    first = -(-tensor.data_ptr() // _HUGE) * _HUGE
    last = (tensor.data_ptr() + nbytes) // _HUGE * _HUGE
    advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _ADVICE)


@cache
def _madvise() -> Any:
    if _ADVICE is None or not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
