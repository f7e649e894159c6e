"""Reduces the cost of process groups of ranks on one machine, and ends them before their process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo


def share_device() -> None:
    """Make all process groups of this rank share one thread; call it before the first group is created.

    Otherwise each group has a device with a thread that polls a hundred times per second. Megatron creates dozens of
    groups per rank, so a few jobs of eight ranks would use up a small machine.
    """
    original: Any = ProcessGroupGloo.__init__
    options_of: Any = ProcessGroupGloo._Options  # type: ignore[attr-defined]
    device = ProcessGroupGloo.create_default_device()

    def create(self: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: timedelta, **newer: Any) -> None:
        options = options_of()
        options._devices, options._timeout = [device], timeout
        for name, value in newer.items():  # `enable_reconfigure` since torch 2.14
            setattr(options, name, value)
        original(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = create  # type: ignore[assignment, method-assign]


def leave_groups() -> None:
    """End all process groups except the world group.

    Megatron's `destroy_model_parallel` only drops references to them, and their threads continue to poll.
    """
    groups = torch.distributed.distributed_c10d._world.pg_map
    for group in [group for group in groups if group is not torch.distributed.group.WORLD]:
        torch.distributed.destroy_process_group(group)
