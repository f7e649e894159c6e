"""The accelerator of this process; no other module uses torch's modules for a kind of device.

`torch.accelerator` (since torch 2.6) covers CUDA, ROCm (which torch calls "cuda"), XPU, and devices that other packages
register, as torch_npu does for Ascend. Older releases of torch have the same functions only in a module for each kind
of device: `torch.cuda`, `torch.xpu`, `torch.npu`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.lazy_torch import torch

_CPU = "cpu"
_WITHOUT_DATA = "meta"
# Written by NVIDIA's kernel module, proprietary or open.
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_NVIDIA_VERSION = re.compile(r"Kernel Module\b.*?\s(?P<version>\d+(\.\d+)+)\s")


def accelerator_type() -> str | None:
    """Return the kind of accelerator that this process can use.

    Returns:
        Its name in torch ("cuda", "xpu", "npu"), or None on a machine that has none.
    """
    if hasattr(torch, "accelerator"):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return None if accelerator is None else accelerator.type
    return next((kind for kind in _kinds_before_2_6() if device_module(kind).is_available()), None)


def _kinds_before_2_6() -> Iterator[str]:
    """Yield the kinds of devices that have a module in torch 2.4 and 2.5; registered ones come first."""
    kinds = (torch._C._get_privateuse1_backend_name(), "cuda", "xpu")
    return (kind for kind in kinds if hasattr(device_module(kind), "is_available"))


def device_module(kind: str) -> Any:
    """Return torch's module for a kind of device, such as `torch.cuda`; None if torch has none."""
    return getattr(torch, kind, None)


def current_device(kind: str) -> torch.device:
    """Return this thread's current device of a kind, with its index if the kind has indices."""
    current = getattr(device_module(kind), "current_device", None)
    index = None if kind == _CPU or current is None else current()
    return torch.device(kind, index) if isinstance(index, int) else torch.device(kind)


def holds_data(device: torch.device) -> bool:
    """Return True if tensors on the device have data, which is false for the device `meta` only."""
    return device.type != _WITHOUT_DATA


def pins_memory() -> bool:
    """Return True if host memory can be pinned for an accelerator."""
    return accelerator_type() is not None


def host_buffer(nbytes: int) -> torch.Tensor:
    """Return uninitialized bytes of host memory, pinned if there is an accelerator.

    Pinned memory is limited, and a job without it is slower but not wrong. If the system refuses it, the result is
    ordinary memory.
    """
    return _allocate_on_host(partial(torch.empty, nbytes, dtype=torch.uint8))


def empty_on_host(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized, contiguous tensor on the CPU, pinned as in `host_buffer`."""
    return _allocate_on_host(partial(torch.empty_like, like, memory_format=torch.contiguous_format))


def _allocate_on_host(allocate: Callable[..., torch.Tensor]) -> torch.Tensor:
    if pins_memory():
        with suppress(RuntimeError):
            return allocate(device=_CPU, pin_memory=True)
    return allocate(device=_CPU)


def is_staged(device: torch.device) -> bool:
    """Return True if copies to the device are asynchronous and an event reports their end."""
    module = device_module(device.type)
    return device.type == accelerator_type() and hasattr(module, "Event") and hasattr(module, "device")


def wait_for_copies(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for all copies that this thread has issued to a device so far."""
    module = device_module(device.type)
    with module.device(device):
        event = module.Event()
        event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def driver_versions(driver: Path = _NVIDIA_DRIVER) -> Mapping[str, str]:
    """Return the versions of the accelerator's software (CUDA, ROCm, NCCL, driver) that this process has.

    Args:
        driver: the file in which NVIDIA's kernel module writes its version.
    """
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "NCCL": _nccl_version()}
    if driver.exists() and (line := _NVIDIA_VERSION.search(driver.read_text(encoding="utf-8", errors="replace"))):
        versions["NVIDIA driver"] = line["version"]
    return {name: version for name, version in versions.items() if version}


def _nccl_version() -> str | None:
    """Return the version of NCCL that torch was built with (for ROCm, RCCL reports under the same name).

    Returns:
        The version, or None if torch was built without it.
    """
    if not hasattr(torch._C, "_nccl_version"):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


class _NvmlMemory(ctypes.Structure):
    """`nvmlMemory_t` of NVIDIA's management library."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def smallest_memory() -> int | None:
    """Return the bytes of the smallest GPU of this machine; no context is created on any.

    Source: `nvmlDeviceGetMemoryInfo`, NVML API reference (libnvidia-ml.so.1).

    Returns:
        None without a GPU of NVIDIA, or without its library.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        sizes = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            memory = _NvmlMemory()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0:
                nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
                sizes.append(int(memory.total))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return min(filter(None, sizes), default=None)
