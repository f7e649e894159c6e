"""Reduces the cost of process groups of ranks on one machine, and ends them before their process."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo


def share_device() -> None:
    """Make all process groups of a process share one thread; call it before the first group is created.

    Otherwise each group has a device with a thread that polls a hundred times per second. Megatron creates dozens of
    groups per rank, so a few jobs of eight ranks would use up a small machine. A process that is forked later has a
    thread of its own.
    """
    original: Any = ProcessGroupGloo.__init__
    options_of: Any = ProcessGroupGloo._Options  # type: ignore[attr-defined]
    devices: dict[int, Any] = {}

    def create(self: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: timedelta, **newer: Any) -> None:
        if os.getpid() not in devices:
            devices[os.getpid()] = ProcessGroupGloo.create_default_device()
        device, options = devices[os.getpid()], options_of()
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
