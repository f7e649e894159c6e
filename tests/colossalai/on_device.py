"""Moves a trained GeminiDDP and its optimizer to the test device, whose memory the CPU cannot touch, and back.

Import this module before ColossalAI is redirected, while `torch` still means a device by "cuda". Tensors keep their
elements, so a job can go on training with what was loaded on the device.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch

from mcore_ckpt_ext.colossalai import gathering
from tests.harness.device import Counts, DeviceTensor, device
from tests.harness.device_group import device_groups
from tests.harness.replacing import replaced

_MEMORY_OF_CHUNKS = ("cuda_shard", "cuda_global_chunk")
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")
_GENUINE = {name: getattr(torch, name) for name in _FACTORIES}
_GENUINE_METHODS = {name: getattr(torch.Tensor, name) for name in ("to", "cpu", "cuda", "pin_memory")}


class _TorchWithSubclasses:
    """`torch` where `own_copy` disables ColossalAI's classes of tensors: that of the test device has to stay."""

    _C = types.SimpleNamespace(DisableTorchFunction=contextlib.nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def on_device(model: Any, optimizer: Any) -> Iterator[Counts]:
    """Within this scope, everything that ColossalAI keeps on its GPU lies on the test device; yields what crosses."""
    with contextlib.ExitStack() as stack:
        for parameters in (model.fp16_params, model.fp32_params):
            for chunk in model.chunk_manager.get_chunks(parameters):
                held = {name: getattr(chunk, name) for name in _MEMORY_OF_CHUNKS}
                stack.enter_context(replaced(chunk, **{name: _moved(tensor) for name, tensor in held.items()}))
        in_chunks = {id(parameter) for parameter in model.fp16_params}
        for outside in (one for one in model.module.parameters() if id(one) not in in_chunks):
            stack.enter_context(_swapped(outside))
        for module in model.module.modules():
            stack.enter_context(_on_device(partial(getattr, module, "_buffers")))
        for stepped in optimizer.id_to_fake_params.values():
            chunk = optimizer.param_to_chunk16[stepped]
            if (chunk.paired_chunk or chunk).device_type == "cuda":
                stack.enter_context(_on_device(partial(optimizer.optim.state.__getitem__, stepped)))
                stack.enter_context(_swapped(stepped))
        stack.enter_context(replaced(torch, **_GENUINE))
        stack.enter_context(replaced(torch.Tensor, **_GENUINE_METHODS))
        stack.enter_context(replaced(gathering, torch=_TorchWithSubclasses()))
        counts = stack.enter_context(device())
        stack.enter_context(device_groups())
        yield counts


def _moved(tensor: Any) -> Any:
    """Return a tensor with the same memory on the device; anything else as it is."""
    return DeviceTensor(tensor) if isinstance(tensor, torch.Tensor) else tensor


@contextlib.contextmanager
def _on_device(tensors: Callable[[], MutableMapping[str, Any]]) -> Iterator[None]:
    """Within this scope, the tensors of a mapping are on the device; it may be replaced meanwhile."""
    held = tensors()
    held.update({name: _moved(tensor) for name, tensor in held.items()})
    try:
        yield
    finally:
        held = tensors()
        held.update({name: one._hidden for name, one in held.items() if isinstance(one, DeviceTensor)})


@contextlib.contextmanager
def _swapped(parameter: torch.nn.Parameter) -> Iterator[None]:
    """Within this scope, a parameter is on the device; it stays the same object, because it is a key of dicts."""
    other = DeviceTensor(parameter.detach()).requires_grad_(parameter.requires_grad)
    other.__dict__.update(parameter.__dict__, _is_param=True)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
