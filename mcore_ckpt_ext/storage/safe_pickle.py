"""Unpickling that executes nothing a checkpoint brings along.

A short list of classes and functions is real. Every other class becomes an inert placeholder, so that a checkpoint can
be read where Megatron is not installed. What no checkpoint needs, such as a function of the standard library, is
refused by name.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import types
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from mcore_ckpt_ext.errors import CheckpointError, UnsafePickleError, format_value, shorten
from mcore_ckpt_ext.storage.budget import Budget, elements_of
from mcore_ckpt_ext.storage.dtypes import DTYPE_NAMES, Dtype, dtype_named
from mcore_ckpt_ext.storage.pickle_cost import weigh
from mcore_ckpt_ext.storage.pickle_stubs import (
    PickleStub,
    Placeholder,
    Record,
    Stateless,
    inert_class,
    origin_of,
    record_class,
)
from mcore_ckpt_ext.storage.plain_pickle import plain_form
from mcore_ckpt_ext.storage.tensor_reference import (
    STORAGE_NAMES,
    Float8Reference,
    StorageReference,
    StorageType,
    TensorReference,
)


class _Function(Stateless):
    """A function that a pickle finds by name; of a plain Python function, it could set the defaults."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class _Namespace(metaclass=PickleStub):
    """Stands for the class `argparse.Namespace`: a pickle gets genuine instances of it, but never the class itself."""

    def __new__(cls, **content: object) -> argparse.Namespace:  # type: ignore[misc]
        """Make a genuine instance."""
        return argparse.Namespace(**content)


@_Function
def _parameter(data: TensorReference, *_: object) -> TensorReference:
    return data


@_Function
def _with_attributes(build: object, _: object, arguments: tuple[Any, ...], *__: object) -> TensorReference:
    """A tensor with Python attributes (torch/_tensor.py, `_rebuild_from_type_v2`), as Megatron's masters are."""
    if build is TensorReference:
        return TensorReference(*arguments)
    if build is _parameter:
        parameter: TensorReference = _parameter(*arguments)
        return parameter
    raise UnsafePickleError("a pickle rebuilds a tensor by an unknown function", found=format_value(build))


_FLOAT8 = "transformer_engine.pytorch.tensor.float8_tensor"
_FLOAT8_CLASS_METHOD = (_FLOAT8, "Float8Tensor", "_make_in_reduce_ex")  # up to 2.13


@_Function
def _inert_getattr(owner: object, name: str) -> object:
    """How Python 3.11 pickles a member of an enum: `getattr(class, name)`. Only placeholders have attributes to get."""
    if isinstance(owner, type) and issubclass(owner, Placeholder):
        if (owner.pickled_module, owner.pickled_name, name) == _FLOAT8_CLASS_METHOD:
            return Float8Reference
        member = owner(name)
        origin_of(member).member = name
        return member
    raise UnsafePickleError(
        "a pickle requests an attribute", found=f"getattr({format_value(owner)}, {format_value(name)})"
    )


def _raw_bytes(kind: type) -> _Function:
    """`bytes` or `bytearray`, of given content only: called with a number, they would make that many zeros."""

    def build(*arguments: Any) -> Any:
        if arguments and not isinstance(arguments[0], (bytes, bytearray, str, list)):
            raise TypeError(f"{kind.__name__} of {format_value(arguments[0])}")
        return kind(*arguments)

    return _Function(build)


def bytes_of_text(text: object, codec: object = "utf-8") -> bytes:
    """`_codecs.encode`, by which protocol 2 writes bytes.

    Raises:
        TypeError: it is asked for something else.
    """
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise TypeError(f"text in {format_value(codec)}")
    return text.encode("latin1")


def _layout_name(name: object) -> str:
    """`torch.serialization._get_layout`, whose result nobody uses."""
    if type(name) is not str:
        raise TypeError(f"a layout named {format_value(name)}")
    return name


_PLAIN = {("torch", "Size"), ("torch.serialization", "_get_layout")}
_METADATA_MODULES = ("torch.distributed.checkpoint", "torch.distributed._shard")

_REAL: dict[tuple[str, str], object] = {
    ("argparse", "Namespace"): _Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("_io", "BytesIO"): io.BytesIO,
    ("_codecs", "encode"): _Function(bytes_of_text),
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Function(_layout_name),
    ("torch._utils", "_rebuild_tensor_v2"): TensorReference,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _Function(_with_attributes),
    (_FLOAT8, "_make_float8_tensor_in_reduce_ex"): Float8Reference,
    **{
        (module, name): value
        for module in ("builtins", "__builtin__")
        for name, value in {
            "set": set, "frozenset": frozenset, "list": list, "dict": dict, "tuple": tuple, "int": int,
            "float": float, "complex": complex, "bool": bool, "bytes": _raw_bytes(bytes),
            "bytearray": _raw_bytes(bytearray), "str": str, "slice": slice, "object": object,
            "getattr": _inert_getattr,
        }.items()
    },
    ("__builtin__", "long"): int,  # Python 2's names, which protocol 2 keeps
    ("__builtin__", "unicode"): str,
    **{("torch", name): StorageType(dtype_named(dtype)) for dtype, name in STORAGE_NAMES.items()},
}  # fmt: skip

_REPEATED = 1 << 10  # bytes: a pickle that is no longer than this, such as a tensor's, may come again
_MANY_BYTES = 1 << 16  # from here on, a pickle is worth the making of the patterns that tell whether it is plain
_FEW = 64  # entries that may be looked at or copied for each byte of a pickle


class SafeUnpickler(pickle.Unpickler):
    """Resolves globals by the rules of this module, and tensors to references."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a global."""
        real = _REAL.get((module, name))
        if real is not None:
            return real
        if module == "torch" and name in DTYPE_NAMES:
            return dtype_named(name)
        if module.startswith(_METADATA_MODULES):
            return record_class(name)
        return inert_class(module, name, self._where)

    def persistent_load(self, reference: Any) -> StorageReference:
        """What stands for a storage."""
        try:
            tag, storage_type, key, _, numel = reference
        except (TypeError, ValueError) as error:
            raise UnsafePickleError("a pickle refers to a storage in an unknown way", where=self._where) from error
        if tag != "storage" or not isinstance(storage_type, StorageType) or type(key) not in (str, int):
            raise UnsafePickleError(
                "a pickle refers to something that is not a storage", found=format_value(tag), where=self._where
            )
        return StorageReference(storage_type.dtype, str(key), elements_of((numel,)))


class _NotPlainError(Exception):
    """A pickle with more in it than its opcodes show."""


class _LittleState(Placeholder):
    """A placeholder that copies only a small state: the pickle may have one large state for a thousand of them.

    It takes no tuple, which could be of tuples, and the key of a dict next.
    """

    def __setstate__(self, state: object) -> None:
        if type(state) is not dict or len(state) > _FEW:
            raise _NotPlainError
        super().__setstate__(state)


@lru_cache(maxsize=1024)
def _with_little_state(kind: type[Placeholder]) -> type[Placeholder]:
    return type(kind.__name__, (_LittleState, kind), {})


class _PlainUnpickler(SafeUnpickler):
    """Makes what keeps its arguments, sizes and dtypes only, which `plain_pickle` counts on."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(data, where)
        self._by_hash: dict[int, list[tuple[Any, ...]]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a global."""
        found = super().find_class(module, name)
        if isinstance(found, type) and issubclass(found, Placeholder):
            return _with_little_state(found)
        if isinstance(found, Dtype) or (module, name) in _PLAIN or module.startswith(_METADATA_MODULES):
            return found
        raise _NotPlainError

    def persistent_load(self, reference: Any) -> Any:
        """A tuple that was to be looked at, or what a call makes."""
        *called, arguments = reference
        if not called:
            # The arguments of a size: a tuple of one of numbers, which are large or it would have been plain.
            of_size = len(arguments) == 1 and type(arguments[0]) is tuple
            values = arguments[0] if of_size else arguments
            if len(values) > _FEW or tuple in map(type, values) or self._is_one_of_many(arguments):
                raise _NotPlainError
            return arguments
        if isinstance(called[0], type) and issubclass(called[0], (Placeholder, Record)):
            return called[0](*arguments)
        if called[0] is tuple and len(arguments) == 1 and type(arguments[0]) is tuple:
            return arguments[0]
        raise _NotPlainError

    def _is_one_of_many(self, values: tuple[Any, ...]) -> bool:
        """Whether a few tuples had this one's hash: a dict of such keys would compare each with all others."""
        try:
            alike = self._by_hash.setdefault(hash(values), [])
        except TypeError:  # no dict has it for a key
            return False
        if values not in alike:
            alike.append(values)
        return len(alike) > _FEW


def safe_loads(data: bytes, where: str) -> Any:
    """Unpickle `data`; tensors come back as `TensorReference`.

    Args:
        data: the pickle.
        where: file and record, for the error message.

    Raises:
        UnsafePickleError: it asks for something that is not data, or is no pickle at all.
        OverBudgetError: it asks for far more work or memory than its size explains.
    """
    try:
        if len(data) >= _MANY_BYTES and (plain := plain_form(data)) is not None:
            with suppress(_NotPlainError):
                return _PlainUnpickler(plain, where).load()
        if not (len(data) <= _REPEATED and _is_bounded(data)):
            weigh(data, Budget(len(data), where))
        return SafeUnpickler(data, where).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way, from KeyError to MemoryError
        raise UnsafePickleError(
            "a pickle is damaged", found=shorten(f"{type(error).__name__}: {error}"), where=where
        ) from error


@lru_cache(maxsize=1024)
def _is_bounded(data: bytes) -> bool:
    """Whether a pickle passes `weigh`; remembered, because tensors of one shape have equal pickles."""
    with suppress(Exception):  # the caller weighs it again, and reports what is wrong
        weigh(data, Budget(len(data), ""))
        return True
    return False
