"""Stand-ins for a module's parameters and buffers, which record what is loaded into them.

``nn.Module._load_from_state_dict`` (torch 2.4 to 2.15), a module's own method of that name and load hooks copy values
into parameters, read them, and change them. They work on stand-ins in place of the live tensors: copying a value of the
caller's dict only records it, and any other operation uses a copy of the recorded value. So neither the live module nor
the dict changes, and a module may load itself in any way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mcore_ckpt_ext.colossalai import tensor_parallel
from mcore_ckpt_ext.colossalai.gathering import own_copy
from mcore_ckpt_ext.colossalai.wrapper import Wrapped
from mcore_ckpt_ext.errors import CheckpointError, join_some

# They use only the shape, dtype and device of a tensor, or return a tensor that `_place` recognizes (`.data`).
_WITHOUT_VALUES = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "detach",
        "alias",
        *(f"{content}_like" for content in ("empty", "zeros", "ones", "full")),
        *(f"new_{content}" for content in ("empty", "zeros", "ones", "full")),
    )
)


@dataclass
class _Record:
    """The known part of a stand-in's value.

    Args:
        stand_in: the tensor in the module.
        names: its names, for messages.
        live: the live tensor, if its whole value is on this rank.
        value: the loaded value; None before it is loaded.
        is_own: True if the value's memory belongs to the record alone.
    """

    stand_in: torch.Tensor
    names: list[str]
    live: torch.Tensor | None
    value: torch.Tensor | None = None
    is_own: bool = False


class StandIns(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Makes the stand-ins of a module, and records the operations on them while it is active.

    Args:
        zero: the wrapper.
        offered: the tensors of the caller's dict.
        are_outlines: True if these tensors have no data, because rank 0 of the group has it: nor have the stand-ins.

    Attributes:
        replacements: the stand-ins by the ids of the live tensors.
        copied_twice: two values of the caller's dict that were copied into one stand-in.
    """

    def __init__(self, zero: Wrapped, offered: Iterable[object], are_outlines: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replacements: dict[int, torch.Tensor] = {}
        self.copied_twice: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._device = torch.device("meta" if are_outlines else "cpu")
        self._records: dict[object, _Record] = {}
        self._unloaded: dict[str, str] = {}
        self._offered = {_storage(tensor) for tensor in offered if isinstance(tensor, torch.Tensor)}
        for parameter in zero.module.parameters():
            is_whole = parameter not in zero.working and not tensor_parallel.is_sharded(parameter)
            dtype = torch.float32 if parameter in zero.masters else parameter.dtype
            value = self._placeholder(tensor_parallel.whole_shape(parameter), dtype)
            made = nn.Parameter(value, requires_grad=parameter.requires_grad)
            self._add(parameter, _Record(made, zero.names[parameter], parameter if is_whole else None))
        for buffer in zero.module.buffers():
            self._add(buffer, _Record(self._placeholder(buffer.shape, buffer.dtype), [], buffer))

    def _placeholder(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        # One element, expanded: for modules and hooks an ordinary tensor, which takes no memory.
        return torch.empty((), dtype=dtype, device=self._device).expand(shape)

    def _add(self, live: torch.Tensor, record: _Record) -> None:
        self.replacements[id(live)] = record.stand_in
        self._records[_place(record.stand_in)] = record

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value that was loaded into a stand-in, or a tensor that a module has put in its place.

        Returns:
            None if nothing was loaded.
        """
        record = self._records.get(_place(tensor))
        return tensor if record is None else record.value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and (record := self._records.get(_place(args[0]))) is not None:
            self._copy(record, args[1])
            return args[0]
        if func.overloadpacket in _WITHOUT_VALUES:
            return func(*args, **kwargs)
        used, more = tree_map_only(torch.Tensor, lambda tensor: self._usable(func, tensor), (args, kwargs))
        result = func(*used, **more)
        # In place, an operation returns the tensor that it was called with.
        return args[0] if args and result is used[0] else result

    def _copy(self, record: _Record, value: torch.Tensor) -> None:
        source = self._records.get(_place(value))
        value = self._usable(torch.ops.aten.copy_.default, value).detach().expand(record.stand_in.shape)
        if record.stand_in.is_floating_point() and not value.is_floating_point():
            value = value.to(record.stand_in.dtype)
        is_offered = source is None and _storage(value) in self._offered
        if is_offered and record.value is not None and not record.is_own:
            self.copied_twice.append((record.value, value))
        # The module may change a tensor of its own afterwards.
        record.value = value if is_offered else value.clone()
        record.is_own = not is_offered

    def _usable(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return a stand-in's value in memory that may be changed; any other tensor as it is."""
        record = self._records.get(_place(tensor))
        if record is None:
            return tensor
        if record.value is None and record.live is None:
            # PyTorch reports a missing key after the hooks, and its message comes first.
            self._unloaded[" = ".join(record.names)] = str(func)
            record.value = torch.ones(tensor.shape, dtype=tensor.dtype, device=self._device)
        elif not record.is_own:
            held: torch.Tensor = record.live if record.value is None else record.value  # type: ignore[assignment]
            record.value = own_copy(held, held.dtype, self._device)
        record.is_own = True
        return record.value  # type: ignore[return-value]  # it has one now

    def refuse_unloaded(self) -> None:
        """Refuse a module that has used the value of a parameter before one was loaded: ZeRO has sharded it.

        Raises:
            CheckpointError: names the parameters.
        """
        if self._unloaded:
            raise CheckpointError(
                "a load hook, or a module's own _load_from_state_dict, uses a parameter that has not been loaded",
                found=f"{next(iter(self._unloaded.values()))} of a parameter that ZeRO has sharded",
                expected="a value in the state dict, copied into the whole parameter",
                where=join_some(list(self._unloaded)),
                hint="add the parameter to the state dict, for example from the present model.state_dict()",
            )


@contextmanager
def standing_in(module: nn.Module, values: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace a module's parameters and buffers by other tensors, under every name, within this scope.

    ColossalAI's tensor-parallel layers (0.5.0, shardformer/layer/parallel_module.py) have their own methods to save and
    load, which gather and slice. The replacements are already whole, so PyTorch's methods replace these, too.
    """
    undo: list[tuple[dict[str, Any], str, Any]] = []
    methods = ("_save_to_state_dict", "_load_from_state_dict")
    for owner in module.modules():
        for held in (vars(owner)["_parameters"], vars(owner)["_buffers"]):
            undo += [(held, name, tensor) for name, tensor in held.items() if id(tensor) in values]
    own_methods = [
        (owner.__dict__, name, getattr(nn.Module, name).__get__(owner))
        for owner in module.modules()
        for name in methods
        if getattr(type(owner), name).__module__.startswith("colossalai.")
    ]
    try:
        for held, name, tensor in undo:
            held[name] = values[id(tensor)]
        for namespace, name, method in own_methods:
            namespace[name] = method
        yield
    finally:
        for held, name, tensor in undo:
            held[name] = tensor
        for namespace, name, _ in own_methods:
            namespace.pop(name, None)


class NoFreedStorage(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Refuses every operation on a parameter whose storage ColossalAI has freed, which would crash torch."""

    def __init__(self, zero: Wrapped) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._zero = zero

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.numel() and not tensor.is_meta:
                self._check(func, tensor)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().nbytes() == 0:
            raise CheckpointError(
                "a state_dict hook, or a method of the module, reads a parameter that ZeRO has sharded and freed",
                found=f"{func} of a tensor of shape {tuple(tensor.shape)} without memory",
                expected="only the state dict that it is given, or the module's registered parameters",
                where=", ".join(self._names_of(tensor)) or None,
                hint="take the values from the state dict that the hook is given",
            )

    def _names_of(self, freed: torch.Tensor) -> list[str]:
        """Return the names of a freed parameter: those of a chunk share a storage at different offsets."""

        def place(tensor: torch.Tensor) -> tuple[Any, Any]:
            return tensor.untyped_storage()._cdata, tensor.storage_offset()

        return [name for p, names in self._zero.names.items() if place(p) == place(freed) for name in names]


def _place(tensor: torch.Tensor) -> object:
    """Return what a tensor and its `.data` have in common, and no view of another shape."""
    return _storage(tensor), tensor.shape, tensor.layout is torch.strided and (tensor.stride(), tensor.storage_offset())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
