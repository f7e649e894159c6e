"""The device on which a process group's collectives take their tensors: its backends decide, not the machine.

A machine may have GPUs and the job's group be gloo's alone; a group may have a backend for each kind of device
(`cpu:gloo,cuda:nccl`, the default of `init_process_group` without a backend), or one from outside torch (`npu:hccl`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt_ext.devices import current_device

_CPU = "cpu"
# They name devices that they reach through the memory of the CPU (`Backend.backend_capability`, torch 2.4 to 2.13).
_THROUGH_THE_CPU = ("gloo", "mpi", "ucc", "fake")


def control_device(group: Any = None) -> torch.device:
    """Return where a few numbers or bytes travel: the CPU, where they are made and read, if the group reaches it.

    torch chooses likewise for its collectives of objects (`_get_object_coll_device`, distributed_c10d.py, 2.6 to 2.13).

    Args:
        group: by default the default group.
    """
    backends = _backends(group)
    return _device(_CPU if _CPU in backends or not backends else next(iter(backends)), group)


def payload_device(group: Any = None) -> torch.device:
    """Return where tensors of a model travel: the accelerator, if the group has a backend of its own for it.

    Args:
        group: by default the default group.
    """
    backends = _backends(group)
    direct = (kind for kind, backend in backends.items() if kind != _CPU and backend not in _THROUGH_THE_CPU)
    kind = next(direct, None)
    return control_device(group) if kind is None else _device(kind, group)


def default_backend(kind: str) -> str:
    """Return the backend that torch chooses for a kind of device, such as `nccl`."""
    return str(dist.Backend.default_device_backend_map.get(kind, kind))


def _backends(group: Any) -> Mapping[str, str]:
    """Return the backend for each kind of device, in the group's order; nothing in a program without ranks."""
    if not dist.is_initialized():
        return {}
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {kind: backend for kind, _, backend in pairs}


def _device(kind: str, group: Any) -> torch.device:
    """Return the group's own device (`device_id` of `init_process_group`), by default this thread's current one."""
    if kind == _CPU:
        return torch.device(_CPU)
    bound: torch.device | None = getattr(group or dist.group.WORLD, "bound_device_id", None)
    return bound if bound is not None and bound.type == kind else current_device(kind)
