"""Process groups of ranks on one machine: what they cost, and how they end before their process does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo


def share_device() -> None:
    """Let all process groups of this rank be served by one thread, before the first is made.

    Each would have a device, with a thread that looks for work a hundred times a second. Megatron makes dozens of
    groups a rank, so a few jobs of eight ranks kept a small machine busy with nothing else.
    """
    original: Any = ProcessGroupGloo.__init__
    options_of: Any = ProcessGroupGloo._Options  # type: ignore[attr-defined]
    device = ProcessGroupGloo.create_default_device()

    def create(self: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = options_of()
        options._devices, options._timeout = [device], timeout
        original(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = create  # type: ignore[assignment, method-assign]


def leave_groups() -> None:
    """End all process groups but the world's.

    Megatron's `destroy_model_parallel` only forgets them, and each keeps threads that look for work.
    """
    groups = torch.distributed.distributed_c10d._world.pg_map
    for group in [group for group in groups if group is not torch.distributed.group.WORLD]:
        torch.distributed.destroy_process_group(group)
