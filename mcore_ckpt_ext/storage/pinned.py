"""Stages bytes for a device in pinned memory: the next block is read while one is being copied.

A copy from pageable memory is synchronous, because the driver copies it once more; a copy from pinned memory is
asynchronous (`cudaMemcpyAsync`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mcore_ckpt_ext.devices import host_buffer, wait_for_copies
from mcore_ckpt_ext.lazy_torch import torch

STAGE_BYTES = 16 << 20
_BLOCKS = 2


class Stages:
    """Staging blocks, used in turn; each thread has its own.

    Args:
        make: allocates host memory of a given number of bytes.
        after_copy: see `wait_for_copies`.
    """

    def __init__(
        self,
        make: Callable[[int], torch.Tensor] = host_buffer,
        after_copy: Callable[[torch.device], Callable[[], None]] = wait_for_copies,
    ) -> None:
        self._make = make
        self._after_copy = after_copy
        self._own = threading.local()

    def send(self, nbytes: int, fill: Callable[[torch.Tensor], None], destination: torch.Tensor) -> None:
        """Fill a block with at most STAGE_BYTES, and start copying it to the device.

        Args:
            nbytes: number of bytes.
            fill: fills a block of `nbytes` bytes.
            destination: destination on the device; the block holds elements of the same dtype.
        """
        blocks: list[torch.Tensor] = self._own.__dict__.setdefault("blocks", [])
        waits: list[Callable[[], None]] = self._own.__dict__.setdefault("waits", [])
        number = self._own.__dict__.get("number", 0)
        self._own.number = (number + 1) % _BLOCKS
        if len(blocks) <= number:
            blocks.append(self._make(STAGE_BYTES))
            waits.append(_nothing)
        waits[number]()
        block = blocks[number][:nbytes]
        fill(block)
        destination.copy_(block.view(destination.dtype).view(destination.shape), non_blocking=True)
        waits[number] = self._after_copy(destination.device)

    def wait(self) -> None:
        """Wait until all copies that this thread started are finished."""
        for wait in self._own.__dict__.get("waits", ()):
            wait()


def _nothing() -> None:
    """Do nothing: no copy has been started."""
