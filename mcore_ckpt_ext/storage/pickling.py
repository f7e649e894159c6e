"""Writes objects that `safe_pickle` has read as torch pickles them, without importing their classes.

Tensors are written as references to records of the archive. Only names in `pickle_allowlist` are written. They are
written with the opcode GLOBAL, whose argument ends at a line break: torch's own safe unpickler supports no other
(torch/_weights_only_unpickler.py, 2.4 to 2.15).
"""

from __future__ import annotations

import collections
import io
import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.lazy_torch import is_dtype, is_tensor, torch
from mcore_ckpt_ext.storage.dtypes import Dtype, name_of
from mcore_ckpt_ext.storage.pickle_allowlist import (
    CLASSES,
    check_output,
    check_writable,
    first_unwritable,
    is_of_own_index,
)
from mcore_ckpt_ext.storage.pickle_stubs import Placeholder, origin_of, placeholder_class
from mcore_ckpt_ext.storage.tensor_reference import STORAGE_NAMES

TORCH_PROTOCOL = 2
INDEX_PROTOCOL = 4
"""The pickle protocols of `torch.save`, and of `.metadata`, which torch writes with `pickle.dump`."""
_AS_DATA = "convert --to canonical"


@dataclass(frozen=True, eq=False)
class DeclaredTensor:
    """A contiguous tensor whose elements are written later; its writer identifies it by `tag`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    tag: object


# The content of one of the records `data/0`, `data/1`, ...: a tensor, or a declared tensor.
Leaf: TypeAlias = "torch.Tensor | DeclaredTensor"


class _Storage:
    def __init__(self, dtype: torch.dtype, key: str, numel: int) -> None:
        self.dtype = dtype
        self.key = key
        self.numel = numel


class TreePickler(pickle._Pickler):
    """A pickler in Python, which can write a global without importing it."""

    # Attributes of the standard library's class that its type stubs omit.
    memo: dict[int, tuple[int, Any]]
    write: Callable[[bytes], object]
    get: Callable[[int], bytes]
    memoize: Callable[[object], None]

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.leaves: list[Leaf] = []
        self._storages: dict[int, _Storage] = {}
        self._globals: dict[tuple[str, str], type[Placeholder]] = {}
        self._texts: dict[str | bytes, str | bytes] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference to the record of a storage; None for other objects."""
        if not isinstance(obj, _Storage):
            return None
        return ("storage", self._placeholder("torch", STORAGE_NAMES[name_of(obj.dtype)]), obj.key, "cpu", obj.numel)

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        """Write an object (a method of the standard pickler)."""
        if type(obj) in (str, bytes):
            # Whether equal strings are one object depends on the history of the process; the pickle must not.
            obj = self._texts.setdefault(obj, obj)
        if is_tensor(obj) or isinstance(obj, DeclaredTensor):
            self._save_tensor(obj)
        elif isinstance(obj, type) and issubclass(obj, Placeholder):
            self._save_global(self._placeholder(obj.pickled_module, obj.pickled_name))
        elif isinstance(obj, Placeholder):
            self._save_placeholder(obj)
        elif isinstance(obj, (Dtype, types.FunctionType)):
            if not self._write_memoized(obj):
                self.save_global(obj)
        else:
            super().save(obj, save_persistent_id)  # type: ignore[misc]  # also missing in the type stubs

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write a class, a function, or an object that reduces to a name (a method of the standard pickler)."""
        if is_dtype(obj) or isinstance(obj, Dtype):
            module = "torch"
            named = name_of(obj)
        elif isinstance(obj, type) and obj in CLASSES:
            module, named = CLASSES[obj]
        else:
            module = obj.__module__
            named = obj.__qualname__
        self._write_global(module, named)
        self.memoize(obj)

    def _write_global(self, module: str, name: str) -> None:
        self._check_writable(module, name)
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())

    def _check_writable(self, module: str, name: str) -> None:
        """Check that a name may be written."""
        check_writable(module, name)

    def _check_placeholder(self, obj: Placeholder) -> None:
        if not is_of_own_index(obj) and (reason := first_unwritable(obj)):
            raise TypeError(reason)

    def _placeholder(self, module: str, name: str) -> type[Placeholder]:
        return self._globals.setdefault((module, name), placeholder_class(module, name))

    def _write_memoized(self, obj: object) -> bool:
        memoized = self.memo.get(id(obj))
        if memoized is not None:
            self.write(self.get(memoized[0]))
        return memoized is not None

    def _save_global(self, named: type[Placeholder]) -> None:
        if not self._write_memoized(named):
            self._write_global(named.pickled_module, named.pickled_name)
            self.memoize(named)

    def _save_placeholder(self, obj: Placeholder) -> None:
        if self._write_memoized(obj):
            return
        self._check_placeholder(obj)
        origin = origin_of(obj)
        self.save(type(obj))
        self.save(tuple(obj.arguments))
        self.write(pickle.REDUCE if origin.called else pickle.NEWOBJ)
        self.memoize(obj)
        for state in origin.state:
            self.save(state)
            self.write(pickle.BUILD)

    def _save_tensor(self, leaf: Leaf) -> None:
        """Write a contiguous tensor with its own storage, as `torch.Tensor.__reduce_ex__` does.

        Source: torch/_tensor.py.
        """
        if self._write_memoized(leaf):
            return
        if name_of(leaf.dtype) not in STORAGE_NAMES:
            raise UnsupportedCheckpointError(
                "files of PyTorch cannot be written with a tensor of this dtype",
                found=name_of(leaf.dtype),
                expected=", ".join(STORAGE_NAMES),
                hint=_AS_DATA,
            )
        shape = tuple(leaf.shape)
        strides = tuple(prod(max(size, 1) for size in shape[axis:]) for axis in range(1, len(shape) + 1))
        storage = _Storage(leaf.dtype, str(len(self.leaves)), prod(shape))
        self.leaves.append(leaf)
        self._save_global(self._placeholder("torch._utils", "_rebuild_tensor_v2"))
        self.save((storage, 0, shape, strides, False, collections.OrderedDict()))
        self.write(pickle.REDUCE)
        self.memoize(leaf)


def dumps(tree: Any, protocol: int = TORCH_PROTOCOL) -> tuple[bytes, list[Leaf]]:
    """Pickle a tree of plain objects, placeholders and tensors, as `torch.save` does.

    Args:
        tree: the object to be pickled.
        protocol: pickle protocol; torch's own safe unpickler only supports that of `torch.save`.

    Returns:
        The pickle, and the tensors whose elements are the records `data/0`, `data/1`, ... of the archive. The pickle
        has been read back to check it.

    Raises:
        UnsupportedCheckpointError: an object in the tree may not be written, or a tensor of its dtype cannot be.
    """
    buffer = io.BytesIO()
    pickler = TreePickler(buffer, protocol)
    try:
        pickler.dump(tree)
        check_output(buffer.getvalue())
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
        raise UnsupportedCheckpointError(
            "the output would contain a class that is not allowed: loading it would run the code of that class",
            found=str(error),
            hint=f"{_AS_DATA}, which holds data only; if this is an honest class, please report it",
        ) from error
    return buffer.getvalue(), pickler.leaves


def named_object(module: str, name: str, state: object) -> Placeholder:
    """Return an object as a pickle would build it from its state; its class need not be installed."""
    built = Placeholder.__new__(placeholder_class(module, name))
    if state != {}:
        built.__setstate__(state)
    return built
