"""Simulates a device whose memory the CPU cannot access, so that code that mixes the two fails as on a GPU.

A `DeviceTensor` reports the device `cuda:0`, or one of another kind; its elements are in a CPU tensor that only this
module accesses. Operands on two devices are refused. So are `numpy()`, addresses, buffers and all other functions that
would read device memory as CPU memory. Copies between the two are allowed, and counted. Non-blocking copies happen as
late as a stream allows: memory that is reused before its event is done has wrong bytes, as on a GPU.

    with device() as counts:             # factories with device="cuda", events, `torch.cuda.current_device`
        tensor = torch.zeros(4, device="cuda")
    counts.to_device                     # bytes
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from mcore_ckpt_ext import devices
from tests.harness.device_addresses import Address, Storage
from tests.harness.replacing import replaced

KIND, INDEX = "cuda", 0
_DEVICE = torch.device(KIND, INDEX)
_T = torch.Tensor
# Functions that would read device memory from the CPU.
_REFUSED = {
    _T.numpy, _T.__array__, _T.__dlpack__, _T.pin_memory, _T.share_memory_, _T.storage, _T.__reduce_ex__,
    _T.apply_, _T.map_,
}  # fmt: skip
# Functions that wait for the device to compute a value for the CPU.
_WAITING = {
    _T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__contains__, _T.nonzero, torch.nonzero,
    torch.equal, _T.equal, _T.is_nonzero, torch.allclose, _T.allclose, _T.masked_select, torch.masked_select,
    torch.unique, _T.unique,
}  # fmt: skip
_MOVING = {_T.to, _T.cpu, _T.cuda}
_OWN_PROPERTIES = ("device", "is_cuda", "is_cpu", "requires_grad", "is_leaf", "grad", "grad_fn", "layout")
_OWN = {getattr(_T, name).__get__ for name in _OWN_PROPERTIES} | {_T.grad.__set__, _T.get_device, _T.requires_grad_}
_SET_DATA: Any = _T.data.__set__  # type: ignore[attr-defined]
_ATEN = torch.ops.aten
# Transformer Engine calls these operators of torch for the parts of its tensors.
_VIEWS = {_ATEN.as_strided, _ATEN.detach, _ATEN.slice, _ATEN.split, _ATEN.split_with_sizes, _ATEN.view}
_INDEXING = {_T.__getitem__, _T.__setitem__}


class DeviceMemoryError(RuntimeError):
    """Raised for operations that a device refuses."""


@dataclass
class Counts:
    """Bytes and numbers of copies, waits and allocations."""

    to_device: int = 0
    to_cpu: int = 0
    copies: int = 0
    waits: int = 0
    allocations: int = 0


class Stream:
    """Pending copies in order; each happens when the device is used next, or an event is waited for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._begun: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._lock:
            self._begun.append((target, source))

    def flush(self) -> None:
        with self._lock, DisableTorchFunction(), torch.no_grad():
            for target, source in self._begun:
                target.copy_(source)
            self._begun.clear()


STREAM = Stream()
COUNTS = Counts()
# Called before each allocation, with its number and its bytes; may raise.
BEFORE_ALLOCATION: list[Callable[[int, int], None]] = []


class Event:
    """An event on the only stream; after waiting for it, everything before it is done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._is_recorded = False

    def record(self, *_: Any) -> None:
        self._is_recorded = True

    def synchronize(self) -> None:
        if self._is_recorded:
            COUNTS.waits += 1
            STREAM.flush()


class DeviceTensor(torch.Tensor):
    """A tensor on the device."""

    _hidden: torch.Tensor

    @staticmethod
    def __new__(cls, hidden: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, hidden.shape, strides=hidden.stride(), dtype=hidden.dtype, device=_DEVICE,
            requires_grad=hidden.requires_grad,
        )  # fmt: skip
        made._hidden = hidden.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":  # gloo replaces NCCL
            STREAM.flush()
            return func(*tree_map(_hidden_of, args), **tree_map(_hidden_of, kwargs or {}))
        if func.overloadpacket in _VIEWS:
            with DisableTorchFunction():
                return _computed(func, tuple(args), dict(kwargs or {}))
        raise DeviceMemoryError(f"{func} of a device tensor is not known to the test device")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction(), torch.no_grad():
            return _called(func, args, dict(kwargs or {}))


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _OWN:
        return func(*args, **kwargs)
    if func in _REFUSED:
        raise DeviceMemoryError(f"{func} reads memory of the device from the CPU")
    if func in _AT_ONCE:
        return _AT_ONCE[func](*args)
    if func is _T.expand_as and args[0].requires_grad and args[0] is args[1]:
        return without_gradients(args[0])
    STREAM.flush()
    return _called_in_order(func, args, kwargs)


def _called_in_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that sees all that was done before it."""
    if func is _T.copy_:
        return _copied(*args, **kwargs)
    if func in _MOVING or (func is _T.type and (len(args) > 1 or kwargs)):
        return _moved(func, args, kwargs)
    if func is _T.type:
        return func(args[0]._hidden).replace("torch.", f"torch.{KIND}.")
    return _computed(func, args, kwargs)


def without_gradients(parameter: torch.Tensor) -> torch.Tensor:
    """Do `expand_as(self)`: Megatron registers hooks on gradient accumulation, which does not exist here."""
    with torch.enable_grad():
        leaf = torch.empty(parameter.shape, device="cpu").requires_grad_()
        return leaf.expand_as(leaf)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function whose operands are all on the device; its results are on the device, too."""
    tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
    others = [item for item in tensors if not isinstance(item, DeviceTensor) and item.dim()]
    if others and func not in _INDEXING:
        raise DeviceMemoryError(f"{func}: expected all tensors to be on the same device, found {KIND} and cpu")
    for item in others:  # an index; assigned values must be on the device, too
        if func is _T.__setitem__ and item is args[-1]:
            raise DeviceMemoryError("a value of the CPU is assigned to elements on the device")
        COUNTS.to_device += item.nbytes
    COUNTS.waits += func in _WAITING
    device = kwargs.get("device")
    leaves = device is not None and not _means_device(device)
    if device is not None:
        kwargs["device"] = "cpu"
    wrappers = {id(item._hidden): item for item in tensors if isinstance(item, DeviceTensor)}
    memory = {item._hidden.untyped_storage()._cdata for item in wrappers.values()}
    result = func(*tree_map(_hidden_of, args), **tree_map(_hidden_of, kwargs))

    def wrapped(item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or leaves:
            return item
        if id(item) in wrappers:
            return wrappers[id(item)]
        return DeviceTensor(item if item.untyped_storage()._cdata in memory else _allocated(item))

    return result if isinstance(result, torch.Size) else tree_map(wrapped, result)


def _hidden_of(item: Any) -> Any:
    return item._hidden if isinstance(item, DeviceTensor) else item


def _moved_to(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Assign `tensor.data = values`: a parameter on the CPU may move to the device, as in `Module.cuda`."""
    if isinstance(tensor, DeviceTensor):
        tensor._hidden = _on_device(values)._hidden
        return
    there = DeviceTensor(_on_device(values)._hidden.detach().requires_grad_(tensor.requires_grad))
    there.__dict__.update({**tensor.__dict__, "_is_param": isinstance(tensor, torch.nn.Parameter)})
    torch.utils.swap_tensors(tensor, there)  # type: ignore[no-untyped-call]


# What does not wait for the device.
_AT_ONCE: dict[Any, Callable[..., Any]] = {
    _T.data_ptr: lambda tensor: Address(tensor._hidden.data_ptr()),
    _T.untyped_storage: lambda tensor: Storage(tensor._hidden.untyped_storage()),
    _SET_DATA: _moved_to,
    torch._has_compatible_shallow_copy_type: lambda *tensors: True,
}


def _on_device(tensor: torch.Tensor) -> DeviceTensor:
    if not isinstance(tensor, DeviceTensor):
        raise DeviceMemoryError("memory of the CPU is given to a tensor on the device")
    return tensor


def _allocated(hidden: torch.Tensor) -> torch.Tensor:
    """Count an allocation, unless it is to fail."""
    COUNTS.allocations += 1
    for hook in BEFORE_ALLOCATION:
        hook(COUNTS.allocations, hidden.nbytes)
    return hidden


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Do `copy_`, the only function with operands on two devices."""
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        target._hidden.copy_(source._hidden)
        return target
    _count(target)
    if non_blocking:
        if not isinstance(target, DeviceTensor):
            target.view(torch.uint8).fill_(0xA5)  # not copied yet
        STREAM.begin(_hidden_of(target), _hidden_of(source))
    else:
        COUNTS.waits += 1
        _hidden_of(target).copy_(_hidden_of(source))
    return target


def _count(target: torch.Tensor) -> None:
    """Count a copy between devices; torch converts dtypes before it (`copy_kernel_cuda`, native/cuda/Copy.cu)."""
    COUNTS.copies += 1
    if isinstance(target, DeviceTensor):
        COUNTS.to_device += target.nbytes
    else:
        COUNTS.to_cpu += target.nbytes


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Do `to`, `cpu`, `cuda` or `type` of a tensor; the result is a new one if the device or the dtype changes."""
    tensor, *rest = args
    values = [*rest, *kwargs.values()]
    dtypes = [item for item in values if isinstance(item, torch.dtype)]
    places = [item.device for item in values if isinstance(item, torch.Tensor)]
    places += [torch.device(item) for item in values if isinstance(item, (str, torch.device))]
    places += [torch.device("cpu")] * (func is _T.cpu) + [_DEVICE] * (func is _T.cuda)
    is_there = isinstance(tensor, DeviceTensor)
    goes_there = _means_device(places[0]) if places else is_there
    copied = kwargs.get("copy", False) or any(item is True for item in rest[1:])
    dtype = dtypes[0] if dtypes else tensor.dtype
    if goes_there == is_there and dtype == tensor.dtype and not copied:
        return tensor
    found = torch.empty_like(_hidden_of(tensor), dtype=dtype, device="cpu", requires_grad=False)
    found.copy_(_hidden_of(tensor))
    result = DeviceTensor(_allocated(found)) if goes_there else found
    if goes_there != is_there:
        _count(result)
        COUNTS.waits += 1
    return result


def _means_device(device: object) -> bool:
    if isinstance(device, (str, torch.device)):
        return torch.device(device).type == KIND
    return type(device) is int


class Factories(TorchFunctionMode):
    """Creates tensors on the device if a call names it; calls with a device tensor go to its class."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
        if any(map(_is_of_another_class, tensors)):
            return _of_another_class(func, args, kwargs)
        if any(isinstance(item, DeviceTensor) for item in tensors):
            return DeviceTensor.__torch_function__(func, types, args, kwargs)
        names = [kwargs.get("device"), *(args[1:] if func is _T.to else ())]
        if func is not _T.cuda and not any(_means_device(item) for item in names if _is_device(item)):
            return func(*args, **kwargs)
        with DisableTorchFunction(), torch.no_grad():
            if func in _MOVING:
                return _moved(func, args, kwargs)
            kwargs["device"] = "cpu"
            return DeviceTensor(_allocated(func(*args, **kwargs)))


def _is_of_another_class(item: object) -> bool:
    return isinstance(item, torch.Tensor) and not isinstance(item, DeviceTensor) and _means_device(item.device)


def _of_another_class(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of a tensor whose parts are tensors on the device: its class does it, if it is the first operand.

    For others it stands for its values: Transformer Engine's tensors in fp8.
    """
    first, *rest = args
    if not _is_of_another_class(first):
        args, kwargs = tree_map(lambda item: item.dequantize() if _is_of_another_class(item) else item, (args, kwargs))
        return func(*args, **kwargs)
    if func is _T.cuda:
        return first
    # Torch's own functions for these need a driver before they call the class.
    if func is _T.copy_:
        type(first).__torch_dispatch__(_ATEN.copy_.default, (type(first),), args, kwargs)
        return first
    if func is _T.__getitem__ and isinstance(rest[0], slice):
        operands = (first, 0, rest[0].start or 0, len(first) if rest[0].stop is None else rest[0].stop)
        return type(first).__torch_dispatch__(_ATEN.slice.Tensor, (type(first),), operands, {})
    with DisableTorchFunction(), torch.no_grad():
        return func(*args, **kwargs)


def _is_device(item: object) -> bool:
    return isinstance(item, (torch.device, int)) or (isinstance(item, str) and item.partition(":")[0] in (KIND, "cpu"))


@contextlib.contextmanager
def device(kind: str = "cuda") -> Iterator[Counts]:
    """Within this scope the process has the device, in the thread that opens it; yields the counts."""
    global COUNTS, KIND, _DEVICE
    COUNTS, KIND, _DEVICE = Counts(), kind, torch.device(kind, INDEX)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(devices, accelerator_type=lambda: KIND))
        stand_ins = {"Event": Event, "device": lambda *_: contextlib.nullcontext(), "current_device": lambda: INDEX}
        stack.enter_context(replaced(devices.device_module(kind), **stand_ins))
        stack.enter_context(Factories())
        yield COUNTS
        STREAM.flush()
