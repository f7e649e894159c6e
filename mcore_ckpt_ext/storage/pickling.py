"""Pickles as torch writes them, of what `safe_pickle` reads: the way back, which imports and executes nothing either.

Classes that are not loaded are written by their names, and tensors as references to records of the archive.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt_ext.storage.safe_pickle import Placeholder, TensorReference, origin_of, placeholder_class

# `torch.FloatStorage` and its siblings, by which torch.save names a storage's dtype (torch/serialization.py).
_STORAGE_NAMES = {
    torch.float64: "DoubleStorage", torch.float32: "FloatStorage", torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage", torch.int64: "LongStorage", torch.int32: "IntStorage",
    torch.int16: "ShortStorage", torch.int8: "CharStorage", torch.uint8: "ByteStorage", torch.bool: "BoolStorage",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class DeclaredTensor:
    """A contiguous tensor whose elements are written later: `tag` tells its writer which one it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    tag: object


# A storage of the archive in the order of their records `data/0`, `data/1`, ...: a tensor at hand, or a declared one.
Leaf = torch.Tensor | DeclaredTensor


class _Storage:
    def __init__(self, dtype: torch.dtype, key: str, numel: int) -> None:
        self.dtype, self.key, self.numel = dtype, key, numel


class _Pickler(pickle._Pickler):
    """The pickler in Python, which can write a global without importing it."""

    # What the standard library's own class has, and its type stubs leave out.
    memo: dict[int, tuple[int, Any]]
    write: Callable[[bytes], object]
    get: Callable[[int], bytes]
    memoize: Callable[[object], None]

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.leaves: list[Leaf] = []
        self._storages: dict[int, _Storage] = {}
        self._globals: dict[tuple[str, str], type[Placeholder]] = {}
        self._texts: dict[str | bytes, str | bytes] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        return ("storage", self._named("torch", _STORAGE_NAMES[obj.dtype]), obj.key, "cpu", obj.numel)

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if type(obj) in (str, bytes):
            # Which equal strings are one object depends on what the process did before; the pickle must not.
            obj = self._texts.setdefault(obj, obj)
        if isinstance(obj, (torch.Tensor, DeclaredTensor)):
            self._save_tensor(obj)
        elif isinstance(obj, type) and issubclass(obj, Placeholder):
            self._save_global(self._named(obj.pickled_module, obj.pickled_name))
        elif isinstance(obj, Placeholder):
            self._save_placeholder(obj)
        elif isinstance(obj, TensorReference):
            raise TypeError("a tensor whose elements were not read cannot be written")
        else:
            super().save(obj, save_persistent_id)  # type: ignore[misc]  # left out of the type stubs, too

    def _named(self, module: str, name: str) -> type[Placeholder]:
        return self._globals.setdefault((module, name), placeholder_class(module, name))

    def _remembered(self, obj: object) -> bool:
        known = self.memo.get(id(obj))
        if known is not None:
            self.write(self.get(known[0]))
        return known is not None

    def _save_global(self, named: type[Placeholder]) -> None:
        if not self._remembered(named):
            self.write(pickle.GLOBAL + f"{named.pickled_module}\n{named.pickled_name}\n".encode())
            self.memoize(named)

    def _save_placeholder(self, obj: Placeholder) -> None:
        if self._remembered(obj):
            return
        origin = origin_of(obj)
        if origin.member is not None:
            self._save_global(self._named("builtins", "getattr"))
            self.save((type(obj), origin.member))
        else:
            self.save(type(obj))
            self.save(tuple(obj.arguments))
        self.write(pickle.REDUCE if origin.called else pickle.NEWOBJ)
        self.memoize(obj)
        for item in origin.items:
            self.save(item)
            self.write(pickle.APPEND)
        for key, value in origin.entries:
            self.save(key)
            self.save(value)
            self.write(pickle.SETITEM)
        for state in origin.state:
            self.save(state)
            self.write(pickle.BUILD)

    def _save_tensor(self, leaf: Leaf) -> None:
        """As `torch.Tensor.__reduce_ex__` does it for a contiguous tensor that owns its storage (torch/_tensor.py)."""
        if self._remembered(leaf):
            return
        shape = tuple(leaf.shape)
        stride, strides = 1, []
        for size in reversed(shape):
            strides.append(stride)
            stride *= max(size, 1)
        numel = 1
        for size in shape:
            numel *= size
        storage = _Storage(leaf.dtype, str(len(self.leaves)), numel)
        self.leaves.append(leaf)
        self._save_global(self._named("torch._utils", "_rebuild_tensor_v2"))
        self.save((storage, 0, shape, tuple(reversed(strides)), False, collections.OrderedDict()))
        self.write(pickle.REDUCE)
        self.memoize(leaf)


def dumps(tree: Any) -> tuple[bytes, list[Leaf]]:
    """Pickle a tree of plain objects, placeholders and tensors, as `torch.save` does.

    Returns:
        The pickle, and the leaves whose elements belong into the records `data/0`, `data/1`, ... of the archive.

    Raises:
        TypeError: something in it cannot be pickled by name.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(tree)
    return buffer.getvalue(), pickler.leaves


def named_object(module: str, name: str, state: object) -> Placeholder:
    """An object of a class that need not be installed, as a pickle would build it: its attributes, or other state."""
    built = Placeholder.__new__(placeholder_class(module, name))
    if state != {}:
        built.__setstate__(state)
    return built
