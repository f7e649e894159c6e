"""The accelerator of this process, whatever its kind: the only module that names a device's own part of torch.

`torch.accelerator` (since torch 2.6) covers CUDA, ROCm (which torch calls "cuda"), XPU, and devices that register
themselves from outside, as torch_npu does for Ascend. Older releases of torch have the same functions only in a module
for each kind of device: `torch.cuda`, `torch.xpu`, `torch.npu`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
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
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return None if found is None else found.type
    return next((kind for kind in _kinds_before_2_6() if device_module(kind).is_available()), None)


def _kinds_before_2_6() -> Iterator[str]:
    """Yield the kinds of devices of which torch 2.4 and 2.5 have a module; one from outside comes first."""
    kinds = (torch._C._get_privateuse1_backend_name(), "cuda", "xpu")
    return (kind for kind in kinds if hasattr(device_module(kind), "is_available"))


def device_module(kind: str) -> Any:
    """Return torch's module for a kind of device (`torch.cuda`, `torch.xpu`, `torch.npu`), or None without one."""
    return getattr(torch, kind, None)


def current_device(kind: str) -> torch.device:
    """Return the device of a kind that this thread uses; for the CPU, and kinds without numbers, without an index."""
    current = getattr(device_module(kind), "current_device", None)
    index = None if kind == _CPU or current is None else current()
    return torch.device(kind, index) if isinstance(index, int) else torch.device(kind)


def holds_data(device: torch.device) -> bool:
    """True where `copy_` fills a tensor: everywhere but on the device `meta`."""
    return device.type != _WITHOUT_DATA


def pins_memory() -> bool:
    """True where the system's memory can be pinned for an accelerator."""
    return accelerator_type() is not None


def host_buffer(nbytes: int) -> torch.Tensor:
    """Return uninitialized bytes of the CPU's memory, pinned where there is an accelerator.

    Pinned memory is limited, and a job without it is slower, not wrong: where the system refuses it, ordinary memory
    is used.
    """
    if pins_memory():
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=_CPU, pin_memory=True)
        except RuntimeError:
            pass
    return torch.empty(nbytes, dtype=torch.uint8, device=_CPU)


def empty_on_host(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor like another in the CPU's memory, pinned where there is an accelerator."""
    return torch.empty_like(like, device=_CPU, pin_memory=pins_memory())


def is_staged(device: torch.device) -> bool:
    """True where copies to a device run beside the CPU, and an event reports their end."""
    module = device_module(device.type)
    return device.type == accelerator_type() and hasattr(module, "Event") and hasattr(module, "device")


def wait_for_copies(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until all that this thread has sent to a device so far has arrived."""
    module = device_module(device.type)
    with module.device(device):
        event = module.Event()
        event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def driver_versions(driver: Path = _NVIDIA_DRIVER) -> Mapping[str, str]:
    """Return the versions of what this process drives its accelerator with; what it does not have is left out.

    Args:
        driver: the file in which the driver's kernel module reports itself.
    """
    found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "NCCL": _nccl_version()}
    if driver.exists() and (line := _NVIDIA_VERSION.search(driver.read_text(encoding="utf-8", errors="replace"))):
        found["NVIDIA driver"] = line["version"]
    return {name: version for name, version in found.items() if version}


def _nccl_version() -> str | None:
    """Return the version of NCCL, or of RCCL under the same name, that torch was built with."""
    if not hasattr(torch._C, "_nccl_version"):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
