"""Unpickles untrusted data without executing any code of a checkpoint.

A short list of classes and functions is used as it is. Every other class becomes a placeholder, so that checkpoints can
be read without Megatron. Names that no checkpoint needs, such as functions of the standard library, are refused.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import types
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from mcore_ckpt_ext.errors import CheckpointError, UnsafePickleError, UnsupportedCheckpointError, format_value, shorten
from mcore_ckpt_ext.storage.budget import Budget, checked_numel
from mcore_ckpt_ext.storage.checked_unpickler import CheckedUnpickler, NameCost
from mcore_ckpt_ext.storage.dtypes import DTYPE_NAMES, Dtype, dtype_named
from mcore_ckpt_ext.storage.pickle_stubs import (
    Function,
    MetadataStub,
    PickleStub,
    Placeholder,
    metadata_class,
    origin_of,
    stub_class,
)
from mcore_ckpt_ext.storage.plain_pickle import plain_form
from mcore_ckpt_ext.storage.tensor_reference import (
    STORAGE_NAMES,
    Float8Reference,
    StorageReference,
    StorageType,
    TensorReference,
)


class _Namespace(metaclass=PickleStub):
    """A stub for `argparse.Namespace` that creates real instances, but never exposes the class itself."""

    def __new__(cls, **content: object) -> argparse.Namespace:  # type: ignore[misc]
        """Return an `argparse.Namespace`."""
        return argparse.Namespace(**content)


@Function
def _parameter(data: TensorReference, *_: object) -> TensorReference:
    return data


@Function
def _with_attributes(build: object, _: object, arguments: tuple[Any, ...], *__: object) -> TensorReference:
    """Rebuild a tensor with Python attributes, such as Megatron's master weights.

    Source: `_rebuild_from_type_v2`, torch/_tensor.py.
    """
    if build is TensorReference:
        return TensorReference(*arguments)
    if build is _parameter:
        parameter: TensorReference = _parameter(*arguments)
        return parameter
    raise UnsafePickleError("a pickle rebuilds a tensor by an unknown function", found=format_value(build))


def _refuse_untyped(where: str, *arguments: object) -> None:
    """Refuse a tensor of a dtype without a storage class, such as uint16 (`_rebuild_tensor_v3`)."""
    raise UnsupportedCheckpointError(
        "a tensor has a dtype that is not supported",
        found=format_value(arguments[6]),
        expected=", ".join(STORAGE_NAMES),
        where=where,
    )


_FLOAT8 = "transformer_engine.pytorch.tensor.float8_tensor"
_FLOAT8_CLASS_METHOD = (_FLOAT8, "Float8Tensor", "_make_in_reduce_ex")  # up to 2.13


@Function
def _safe_getattr(owner: object, name: str) -> object:
    """Replace `getattr`, with which Python 3.11 pickles enum members; only placeholders have attributes."""
    if isinstance(owner, type) and issubclass(owner, Placeholder):
        if (owner.pickled_module, owner.pickled_name, name) == _FLOAT8_CLASS_METHOD:
            return Float8Reference
        member = owner(name)
        origin_of(member).member = name
        return member
    raise UnsafePickleError(
        "a pickle requests an attribute", found=f"getattr({format_value(owner)}, {format_value(name)})"
    )


def encode_latin1(text: object, codec: object = "utf-8") -> bytes:
    """Replace `_codecs.encode`, with which protocol 2 writes bytes.

    Raises:
        TypeError: the arguments are not a string and Latin-1.
    """
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise TypeError(f"text in {format_value(codec)}")
    return text.encode("latin1")


def _layout_name(name: object) -> str:
    """Replace `torch.serialization._get_layout`, whose result is not used."""
    if type(name) is not str:
        raise TypeError(f"a layout named {format_value(name)}")
    return name


_PLAIN = {("torch", "Size"), ("torch.serialization", "_get_layout")}
_METADATA_MODULES = ("torch.distributed.checkpoint", "torch.distributed._shard")

_BUILTIN_MODULES = ("builtins", "__builtin__")
_NUMBERS = (bool, int, float, complex)
_BUILTIN_CLASSES = (*_NUMBERS, str, bytes, bytearray, list, tuple, dict, set, frozenset, slice, object)
_REAL: dict[tuple[str, str], object] = {
    ("argparse", "Namespace"): _Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("_io", "BytesIO"): io.BytesIO,
    ("_codecs", "encode"): Function(encode_latin1),
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): Function(_layout_name),
    ("torch._utils", "_rebuild_tensor_v2"): TensorReference,
    ("torch.storage", "UntypedStorage"): StorageType(dtype_named("uint8")),
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): Function(_with_attributes),
    (_FLOAT8, "_make_float8_tensor_in_reduce_ex"): Float8Reference,
    **{(module, "getattr"): _safe_getattr for module in _BUILTIN_MODULES},
    **{(module, kind.__name__): kind for module in _BUILTIN_MODULES for kind in _BUILTIN_CLASSES},
    ("__builtin__", "long"): int,  # names of Python 2, which protocol 2 uses
    ("__builtin__", "unicode"): str,
    **{("torch", name): StorageType(dtype_named(dtype)) for dtype, name in STORAGE_NAMES.items()},
}

_MANY_BYTES = 1 << 16  # bytes from which compiling the patterns for plain pickles pays
_FEW = 64  # entries that may be visited or copied for each byte of a pickle


def _resolve(module: str, name: str, where: str) -> Any:
    """Return the object or stub for a global."""
    real = _REAL.get((module, name))
    if real is not None:
        return real
    if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
        return Function(partial(_refuse_untyped, where))
    if module == "torch" and name in DTYPE_NAMES:
        return dtype_named(name)
    if module.startswith(_METADATA_MODULES):
        return metadata_class(name)
    return stub_class(module, name, where)


class SafeUnpickler(CheckedUnpickler):
    """Resolves globals by the rules of this module, and returns tensors as references."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(data, where)
        self._where = where
        self._names = NameCost(self.budget)

    def find_class(self, module: str, name: str) -> Any:
        """Return the object or stub for a global."""
        self._names.spend(module, name)
        return _resolve(module, name, self._where)

    def persistent_load(self, reference: Any) -> StorageReference:
        """Return the reference for a storage."""
        try:
            tag, storage_type, key, _, numel = reference
        except (TypeError, ValueError) as error:
            raise UnsafePickleError("a pickle refers to a storage in an unknown way", where=self._where) from error
        if tag != "storage" or not isinstance(storage_type, StorageType) or type(key) not in (str, int):
            raise UnsafePickleError(
                "a pickle refers to something that is not a storage",
                found=format_value((tag, storage_type)),
                where=self._where,
            )
        return StorageReference(storage_type.dtype, str(key), checked_numel((numel,)))


class _NotPlainError(Exception):
    """A pickle is not plain, although its opcodes look like it."""


class _LittleState(Placeholder):
    """A placeholder that accepts only a small state, because many placeholders may share a large one.

    It accepts no tuple, which could contain tuples and become the key of a dict.
    """

    def __setstate__(self, state: object) -> None:
        if type(state) is not dict or len(state) > _FEW:
            raise _NotPlainError
        super().__setstate__(state)


@lru_cache(maxsize=1024)
def _with_little_state(kind: type[Placeholder]) -> type[Placeholder]:
    return type(kind.__name__, (_LittleState, kind), {})


class _PlainUnpickler(pickle.Unpickler):
    """Creates only sizes, dtypes and objects that store their arguments, as `plain_pickle` requires.

    It is the unpickler in C, several times faster than that with checks.
    """

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._where = where
        self._names = NameCost(Budget(len(data), where))
        self._by_hash: dict[int, list[tuple[Any, ...]]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the object or stub for a global."""
        self._names.spend(module, name)
        resolved = _resolve(module, name, self._where)
        if isinstance(resolved, type) and issubclass(resolved, Placeholder):
            return _with_little_state(resolved)
        if isinstance(resolved, Dtype) or (module, name) in _PLAIN or module.startswith(_METADATA_MODULES):
            return resolved
        raise _NotPlainError

    def persistent_load(self, reference: Any) -> Any:
        """Return a tuple after checking it, or the result of a call."""
        *called, arguments = reference
        if not called:
            # The arguments of a size: a tuple with a tuple of numbers. Only large ones get here; small ones are plain.
            of_size = len(arguments) == 1 and type(arguments[0]) is tuple
            values = arguments[0] if of_size else arguments
            if len(values) > _FEW or tuple in map(type, values) or self._is_one_of_many(arguments):
                raise _NotPlainError
            return arguments
        if isinstance(called[0], type) and issubclass(called[0], (Placeholder, MetadataStub)):
            return called[0](*arguments)
        if called[0] is tuple and len(arguments) == 1 and type(arguments[0]) is tuple:
            return arguments[0]
        raise _NotPlainError

    def _is_one_of_many(self, values: tuple[Any, ...]) -> bool:
        """Return whether several tuples have this hash: a dict would compare each such key with all others."""
        try:
            alike = self._by_hash.setdefault(hash(values), [])
        except TypeError:  # not hashable, so not a key of a dict
            return False
        if values not in alike:
            alike.append(values)
        return len(alike) > _FEW


def safe_loads(data: bytes, where: str) -> Any:
    """Unpickle `data`; tensors become `TensorReference` objects.

    Args:
        data: the pickle.
        where: file and record, for error messages.

    Raises:
        UnsafePickleError: the pickle contains more than data, or the bytes are not a pickle.
        OverBudgetError: the pickle needs far more work or memory than its size justifies.
    """
    try:
        if len(data) >= _MANY_BYTES and (plain := plain_form(data)) is not None:
            with suppress(_NotPlainError):
                return _PlainUnpickler(plain, where).load()
        return SafeUnpickler(data, where).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way, from KeyError to MemoryError
        raise UnsafePickleError(
            "a pickle is damaged",
            found=shorten(f"{type(error).__name__}: {error}"),
            where=where,
            hint="use another copy, or another iteration where there is one",
        ) from error
