"""Runs code for CUDA tensors on CPU tensors.

Megatron-LM uses GPUs everywhere: ``device="cuda"``, ``tensor.cuda()``, streams, events, memory statistics.
``install()`` redirects all of this to the CPU, once per process and before the first import of Megatron, so that
Megatron itself stays unchanged.  This shows that logic, formats and numbers are right; it says nothing about CUDA
memory, streams or NCCL.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DEVICE_COUNT = 8
_MEMORY_BYTES = 1 << 34
_TENSOR_TYPES = ("FloatTensor", "IntTensor", "LongTensor", "HalfTensor", "BFloat16Tensor", "ByteTensor")


class _Stream:
    """A stream whose work is always finished."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _Event:
    """An event that has always already occurred."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 0.0


def _means_gpu(device: object) -> bool:
    """Return whether a ``device`` argument names a GPU: "cuda...", a torch.device of that type, or an index."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int


def _means_cpu(device: object) -> bool:
    return device in ("cpu", torch.device("cpu"))


# Functions that take a device as positional argument, or return one.
_BY_POSITION = frozenset(
    {torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type, torch.Tensor.cpu, torch.Tensor.to}
)


class _CudaCallsOnCpu(TorchFunctionMode):
    """Rewrites every torch call that names a GPU into the same call on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and func not in _BY_POSITION:
            return func(*args)
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # DistributedOptimizer sorts parameters by this string.
            return func(*args).replace("torch.", "torch.cuda.")
        leaves_gpu = func is torch.Tensor.cpu or (
            func is torch.Tensor.to and any(_means_cpu(value) for value in (*args[1:2], kwargs.get("device")))
        )
        if _means_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple("cpu" if _means_gpu(argument) else argument for argument in args)
        result = func(*args, **kwargs)
        if leaves_gpu and result.data_ptr() == args[0].data_ptr():
            # From a GPU this is a copy.  Asynchronous saving relies on it: training goes on while the copy is written.
            return result.clone()
        return result


def _always(answer: object) -> Callable[..., Any]:
    """Return a new function that ignores its arguments; torch's compiler distinguishes functions by identity."""
    return lambda *_, **__: answer


def _seeding() -> Callable[[int], Any]:
    # Not torch.manual_seed: that seeds CUDA too and would come back here.
    return lambda seed: torch.default_generator.manual_seed(seed)


def _device_properties(*_: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(major=9, minor=0, name="cpu", total_memory=_MEMORY_BYTES, multi_processor_count=1)


def _cuda_stand_ins() -> dict[str, object]:
    """Return replacements for the attributes of ``torch.cuda`` that Megatron and torch use."""
    devices: dict[str, object] = {
        "is_available": _always(True),
        "is_initialized": _always(False),
        "_lazy_init": _always(None),
        "_lazy_call": lambda callback, **_: callback(),
        "device_count": _always(_DEVICE_COUNT),
        "current_device": _always(0),
        "set_device": _always(None),
        "device": lambda *_: contextlib.nullcontext(),
        "get_device_capability": _always((9, 0)),
        "get_device_name": _always("cpu"),
        "get_device_properties": _device_properties,
        "cudart": types.SimpleNamespace,
    }
    streams: dict[str, object] = {
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "synchronize": _always(None),
        "is_current_stream_capturing": _always(False),
    }
    memory: dict[str, object] = {
        "empty_cache": _always(None),
        "mem_get_info": _always((_MEMORY_BYTES, _MEMORY_BYTES)),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": _always(None),
        **{
            name: _always(0)
            for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        },
    }
    # One generator for the CPU and all "GPUs": Megatron saves, restores and forks these states by itself.
    random: dict[str, object] = {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": _seeding(),
        "manual_seed_all": _seeding(),
        "default_generators": (torch.default_generator,) * _DEVICE_COUNT,
    }
    # Megatron compares with these by isinstance.
    tensor_types: dict[str, object] = {name: getattr(torch, name) for name in _TENSOR_TYPES}
    return devices | streams | memory | random | tensor_types


# torch itself uses torch.accelerator (for example in Adam's step), which must not report a GPU: real CUDA calls would
# follow.
_ACCELERATOR_STAND_INS: dict[str, object] = {
    "is_available": _always(False),
    "current_accelerator": _always(None),
    "current_device_index": _always(0),
    "device_count": _always(0),
    "synchronize": _always(None),
}


def install() -> None:
    """Redirect CUDA to the CPU for the rest of this process (calls on tensors: in the thread that calls this)."""
    for name, stand_in in _cuda_stand_ins().items():
        setattr(torch.cuda, name, stand_in)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, _always(None))
    for name, stand_in in _ACCELERATOR_STAND_INS.items():
        setattr(torch.accelerator, name, stand_in)
    mode: Any = _CudaCallsOnCpu()
    mode.__enter__()
