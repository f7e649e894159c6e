"""Keeps ColossalAI's "GPU" tensors in CPU memory, because its own CPU accelerator is almost empty.

ColossalAI sees an accelerator named "cuda" whose device is ``cuda:0``: the name decides whether a chunk counts as
offloaded (``Chunk.device_type``), so placements behave as on GPUs. Requests to torch for that device get CPU memory. A
move between the two devices is always a copy, as between a GPU and its host. A ``TorchFunctionMode`` is not sufficient:
it is disabled while it handles a call, and Gemini works inside such calls (the gradient hooks run within
``Tensor.backward``).

This shows that logic, formats and numbers are right; it says nothing about CUDA memory, streams or NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

_GPU = torch.device("cuda", 0)
_MEMORY_BYTES = 1 << 34
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "full", "full_like", "ones", "ones_like", "rand", "rand_like",
    "randint", "randn", "randn_like", "scalar_tensor", "tensor", "zeros", "zeros_like",
)  # fmt: skip


class Stream:
    """A stream whose work is always finished, so that there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Nothing."""


def _is_gpu(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _is_device(value: object) -> bool:
    return _is_gpu(value) or value == "cpu" or value == torch.device("cpu")


def _made_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **keywords: Any) -> Any:
        if _is_gpu(keywords.get("device")):
            keywords["device"] = "cpu"
        keywords.pop("pin_memory", None)
        return factory(*args, **keywords)

    return make


def _moved(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        if any(map(_is_device, (*args[:1], keywords.get("device")))):
            args = ("cpu", *args[1:]) if args and _is_device(args[0]) else args
            if "device" in keywords:
                keywords["device"] = "cpu"
            keywords["copy"] = True
        return original(tensor, *args, **keywords)

    return to


def _copied(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor.detach().clone() if not tensor.requires_grad else tensor.clone()


class _CpuAdam:
    """Replaces ColossalAI's compiled CPU Adam: the same arguments, and the arithmetic of its ``torch_adam_update``."""

    def __init__(self, *arguments: Any) -> None:
        self._decoupled = bool(arguments[5])

    def step(
        self, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, bias_correction: bool,
        param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, div_scale: float,
    ) -> None:  # fmt: skip
        """Advance one flat parameter in place; the gradient is divided by the loss scale first."""
        gradient = grad.float() / div_scale if div_scale > 0 else grad.float()
        correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        if weight_decay and self._decoupled:
            param.mul_(1 - lr * weight_decay)
        elif weight_decay:
            gradient = gradient.add(param, alpha=weight_decay)
        exp_avg.mul_(beta1).add_(gradient, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (exp_avg_sq.sqrt() / correction2**0.5).add_(eps)
        param.addcdiv_(exp_avg, denominator, value=-lr / correction1)


class _CpuAdamExtension:
    """An extension for ColossalAI's kernel loader; its own needs the CUDA runtime even on a CPU."""

    name = "cpu_adam_torch"
    priority = 99

    def is_available(self) -> bool:
        return True

    def assert_compatible(self) -> None:
        pass

    def load(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(CPUAdamOptimizer=_CpuAdam)


def _accelerator() -> Any:
    """Return ColossalAI's CPU accelerator under the name of the CUDA accelerator."""
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    answers = {
        "get_current_device": lambda _: _GPU,
        "current_device": lambda _: 0,
        "set_device": lambda *_: None,
        "device_count": lambda _: 1,
        "synchronize": lambda *_: None,
        "empty_cache": lambda _: None,
        "manual_seed": lambda _, seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda _, seed: torch.default_generator.manual_seed(seed),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "reset_max_memory_allocated": lambda *_: None,
        "reset_max_memory_cached": lambda *_: None,
        "Stream": Stream,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
    }
    accelerator = type("CpuAsCuda", (CpuAccelerator,), answers)()
    accelerator._name = "cuda"
    return accelerator


def redirect_torch() -> None:
    """Make torch allocate CPU memory for all requests for a GPU."""
    for name in _FACTORIES:
        setattr(torch, name, _made_on_cpu(getattr(torch, name)))
    torch.Tensor.to = _moved(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.cpu = _copied  # type: ignore[method-assign]
    torch.Tensor.cuda = _copied  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assign,misc]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign,assign]
    torch.jit.script = lambda function, *_, **__: function
    for name in ("synchronize", "reset_peak_memory_stats", "set_device", "empty_cache"):
        setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        setattr(torch.cuda, name, lambda *_: 0)
    properties = types.SimpleNamespace(total_memory=_MEMORY_BYTES)
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assign,misc]


def install() -> None:
    """Redirect for the rest of this process, once, before the first import of ``colossalai.zero``."""
    torch.set_num_threads(1)
    from colossalai.accelerator import set_accelerator

    redirect_torch()
    set_accelerator(_accelerator())
    # ColossalAI compares the backend of every process group with this one, which torch does not define
    # (pipeline/p2p.py).
    torch.distributed.Backend.HCCL = "hccl"  # type: ignore[attr-defined]
    from colossalai.kernel.kernel_loader import CPUAdamLoader

    CPUAdamLoader.REGISTRY = [_CpuAdamExtension]
