"""The device for the tensors of a process group's collectives, by the backends of the group.

A machine may have GPUs while the job's only backend is gloo. A group may have a backend for each kind of device
(`cpu:gloo,cuda:nccl`, the default of `init_process_group` without a backend), or one from outside torch (`npu:hccl`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt_ext.devices import current_device

_CPU = "cpu"
# These backends list accelerators but send through host memory (`Backend.backend_capability`, torch 2.4 to 2.15).
_THROUGH_THE_CPU = ("gloo", "mpi", "ucc", "fake")


def control_device(group: Any = None) -> torch.device:
    """Return the device for short messages (numbers, bytes): the CPU if the group has a backend for it.

    torch chooses likewise for its collectives of objects (`_get_object_coll_device`, distributed_c10d.py, 2.6 to 2.15).

    Args:
        group: the process group; None is the default group.
    """
    backends = _backends(group)
    return _device(_CPU if _CPU in backends or not backends else next(iter(backends)), group)


def payload_device(group: Any = None) -> torch.device:
    """Return the device for a model's tensors: the accelerator if the group has a direct backend for it.

    Args:
        group: the process group; None is the default group.
    """
    backends = _backends(group)
    direct = (kind for kind, backend in backends.items() if kind != _CPU and backend not in _THROUGH_THE_CPU)
    kind = next(direct, None)
    return control_device(group) if kind is None else _device(kind, group)


def default_backend(kind: str) -> str:
    """Return the backend that torch chooses for a kind of device, such as `nccl`."""
    return str(dist.Backend.default_device_backend_map.get(kind, kind))


def _backends(group: Any) -> Mapping[str, str]:
    """Return the backend of each kind of device, in the group's order; empty without torch.distributed."""
    if not dist.is_initialized():
        return {}
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {kind: backend for kind, _, backend in pairs}


def _device(kind: str, group: Any) -> torch.device:
    """Return the group's bound device (`device_id` of `init_process_group`), else the current device."""
    if kind == _CPU:
        return torch.device(_CPU)
    bound: torch.device | None = getattr(group or dist.group.WORLD, "bound_device_id", None)
    return bound if bound is not None and bound.type == kind else current_device(kind)
