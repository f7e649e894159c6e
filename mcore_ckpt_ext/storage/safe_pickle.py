"""Unpickling that executes nothing a checkpoint brings along.

A short list of classes and functions is real. Every other class becomes an inert placeholder, so that a
checkpoint can be read without Megatron at hand. What no checkpoint needs, a function of the standard library
say, is refused by name.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

from mcore_ckpt_ext.errors import CheckpointError, UnsafePickleError, shortened, shown
from mcore_ckpt_ext.storage.budget import Budget, elements_of
from mcore_ckpt_ext.storage.pickle_scan import is_plain, weigh


class _Sealed(type):
    """Classes that a pickle knows by name, and whose attributes it may not set: they outlive it."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"a pickle sets {name} of {cls.__name__}")


class Record(metaclass=_Sealed):
    """An object known by its attributes only; stands for every class of torch's checkpoint metadata."""

    def __init__(self, *arguments: object) -> None:
        """Members of an enum arrive here, with their value."""
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # Kept as it is, not copied: a large checkpoint has hundreds of thousands.
        self.__dict__ = state

    def __repr__(self) -> str:
        # Not what it holds, which may refer to itself, or to one thing a billion times.
        return f"<{type(self).__name__}>"


class Placeholder(metaclass=_Sealed):
    """An object of a class that is not loaded: keeps what the pickle said of it, does nothing.

    `pickling.dumps` writes it back as it was read.
    """

    pickled_module = ""
    pickled_name = ""
    arguments: tuple[object, ...]
    _origin: Origin

    def __new__(cls, *arguments: object, **keywords: object) -> Placeholder:
        """Keep the constructor's arguments; enum members arrive this way, with their value."""
        self = super().__new__(cls)
        self.arguments = arguments
        self._origin = Origin()
        return self

    def __init__(self, *arguments: object, **keywords: object) -> None:
        """Accept anything."""
        self._origin.called = True

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if key != "_origin"})
        self._origin.state = (state,)

    def append(self, item: object) -> None:
        """A pickled subclass of list."""
        self._origin.items.append(item)

    def extend(self, items: list[object]) -> None:
        """A pickled subclass of list."""
        self._origin.items.extend(items)

    def __setitem__(self, key: object, value: object) -> None:
        self._origin.entries.append((key, value))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled again, by whoever saves what was read here, it is still a placeholder, never what it stands for."""
        return _again, (self.pickled_module, self.pickled_name, vars(self))

    def __repr__(self) -> str:
        return f"<{self.pickled_module}.{self.pickled_name} {shown(self.arguments)}>"


class Origin:
    """How a pickle built a placeholder: by a call or by `__new__` alone, or as the attribute `member` of a class.

    `state` holds what `__setstate__` got, if anything; `items` and `entries` what was appended and set.
    """

    def __init__(self) -> None:
        self.called = False
        self.member: str | None = None
        self.state: tuple[object, ...] = ()
        self.items: list[object] = []
        self.entries: list[tuple[object, object]] = []


def origin_of(placeholder: Placeholder) -> Origin:
    """What a placeholder was made from."""
    return placeholder._origin


def _again(module: str, name: str, content: dict[str, Any]) -> Placeholder:
    placeholder = placeholder_class(module, name)()
    vars(placeholder).update(content)
    return placeholder


class TensorProperties(Record):
    """`torch.distributed.checkpoint.metadata.TensorProperties`: its state is a tuple that begins with the dtype."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if tuple in map(type, state):  # as `pickle_scan.is_plain` counts on
            raise TypeError("properties of a tensor with a tuple among them")
        self.dtype = state[0]


class Unread(Record):
    """A part of the ranks' plans, which stand in the metadata beside what they led to: nobody reads them."""

    def __setstate__(self, state: object) -> None:
        """Forget it."""
        if type(state) is not dict:  # as `pickle_scan.is_plain` counts on
            raise TypeError(f"a {type(self).__name__} whose state is no dict")


class _Stateless(metaclass=_Sealed):
    """An object that a pickle may refer to but not fill."""

    def __setstate__(self, state: object) -> None:
        raise TypeError(f"a pickle sets the state of a {type(self).__name__}")


class _Function(_Stateless):
    """A function that a pickle knows by name: of a plain one it could set the defaults."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class _Namespace(metaclass=_Sealed):
    """`argparse.Namespace`, which is written in Python: a pickle makes genuine ones and never holds the class."""

    def __new__(cls, **content: object) -> argparse.Namespace:  # type: ignore[misc]
        """Make a genuine one."""
        return argparse.Namespace(**content)


class StorageReference(_Stateless):
    """What a pickled tensor says of its storage: `key` names the archive's record, `numel` counts `dtype` elements."""

    def __init__(self, dtype: torch.dtype, key: str, numel: int) -> None:
        self.dtype, self.key, self.numel = dtype, key, numel


class TensorReference(_Stateless):
    """A pickled tensor without its data: shape and strides in elements, `offset` elements into the storage."""

    def __init__(
        self, storage: StorageReference, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *more: object
    ) -> None:
        """Keep the description; of `more`, as `torch._utils._rebuild_tensor_v2` takes it, the third may be marks.

        Raises:
            TypeError, ValueError: there is no such tensor, or its elements mean something else than they say.
        """
        marks = more[2] if len(more) > 2 else None
        if isinstance(marks, dict) and any(marks.values()):
            raise ValueError("a tensor that is marked as negative or conjugated, which torch would make it on reading")
        self.storage, self.offset, self.shape, self.stride = storage, offset, tuple(shape), tuple(stride)
        if not isinstance(storage, StorageReference):
            raise TypeError(f"a tensor without a storage: {shown(storage)}")
        try:
            elements_of(self.shape)
            if len(self.shape) != len(self.stride):
                raise ValueError("as many strides as axes are needed")
            for number in (offset, *self.stride):
                elements_of((number,))
        except ValueError as error:
            found = f"a tensor of shape {shown(self.shape)}, strides {shown(self.stride)}, from element {shown(offset)}"
            raise ValueError(f"{found}: {error}") from error

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


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
    raise UnsafePickleError("a pickle rebuilds a tensor by an unknown function", found=shown(build))


@_Function
def _inert_getattr(owner: object, name: str) -> object:
    """Enums of Python 3.11 are pickled as `getattr(class, name)`; only placeholders have anything to get."""
    if isinstance(owner, type) and issubclass(owner, Placeholder):
        member = owner(name)
        origin_of(member).member = name
        return member
    raise UnsafePickleError("a pickle asks for an attribute", found=f"getattr({shown(owner)}, {shown(name)})")


def _raw_bytes(kind: type) -> _Function:
    """`bytes` and `bytearray` of given content; of a number they would make so many zeros."""

    def build(*arguments: Any) -> Any:
        if arguments and not isinstance(arguments[0], (bytes, bytearray, str, list)):
            raise TypeError(f"{kind.__name__} of {shown(arguments[0])}")
        return kind(*arguments)

    return _Function(build)


def bytes_of_text(text: object, codec: object = "utf-8") -> bytes:
    """`_codecs.encode`, which is how protocol 2 writes bytes.

    Raises:
        TypeError: it is asked for something else.
    """
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise TypeError(f"text in {shown(codec)}")
    return text.encode("latin1")


def _layout_name(name: object) -> str:
    """`torch.serialization._get_layout`, whose result nobody looks at."""
    if type(name) is not str:
        raise TypeError(f"a layout named {shown(name)}")
    return name


class _StorageType(_Stateless):
    """`torch.FloatStorage` and its siblings, as pickled: only the dtype matters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip

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
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
}  # fmt: skip

# Classes of the standard library that stand in checkpoints and mean nothing to us.
_HARMLESS = {
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"),
    ("signal", "Signals"), ("datetime", "datetime"), ("datetime", "timedelta"), ("functools", "partial"),
    ("uuid", "UUID"), ("enum", "Enum"), ("copyreg", "_reconstructor"),
    ("builtins", "range"), ("__builtin__", "range"), ("__builtin__", "xrange"),  # a list of one can fill any memory
}  # fmt: skip

# `sys.stdlib_module_names` has those of this platform's sources only in part.
_SYSTEM_MODULES = {"__builtin__", "posix", "nt", "os2", "commands", "__main__"}

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# What a common state of a checkpoint has at most, counted as often as it is referred to; real ones have thousands.
_MOST_NODES, _DEEPEST = 1 << 30, 200
_REPEATED = 1 << 10  # bytes of a pickle that may come again: of a tensor


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
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module.startswith(_METADATA_MODULES):
            return _RECORD_CLASSES.get(name) or _record_class(name)
        return inert_class(module, name, self._where)

    def persistent_load(self, reference: Any) -> StorageReference:
        """What stands for a storage."""
        try:
            tag, storage_type, key, _, numel = reference
        except (TypeError, ValueError) as error:
            raise UnsafePickleError("a pickle refers to a storage in an unknown way", where=self._where) from error
        if tag != "storage" or not isinstance(storage_type, _StorageType) or type(key) not in (str, int):
            raise UnsafePickleError(
                "a pickle refers to something that is no storage", found=shown(tag), where=self._where
            )
        return StorageReference(storage_type.dtype, str(key), elements_of((numel,)))


class _NotPlainError(Exception):
    """A pickle with other classes than an index has."""


class _PlainUnpickler(SafeUnpickler):
    """Makes records, sizes and dtypes only, which `pickle_scan.is_plain` counts on."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a global."""
        if module.startswith(_METADATA_MODULES) or (module, name) in _PLAIN or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise _NotPlainError


# `torch.distributed.checkpoint.planner` has the last two.
_RECORD_CLASSES: dict[str, type[Record]] = {
    "TensorProperties": TensorProperties, "WriteItem": Unread, "TensorWriteData": Unread,
}  # fmt: skip


@lru_cache(maxsize=1024)
def _record_class(name: str) -> type[Record]:
    return type(name, (Record,), {})


@lru_cache(maxsize=1024)
def placeholder_class(module: str, name: str) -> type[Placeholder]:
    """The class that stands for `module.name`."""
    names = {"pickled_module": module, "pickled_name": name}
    return type(name.rpartition(".")[2], (Placeholder,), names)


def inert_class(module: str, name: str, where: str) -> type[Placeholder]:
    """The class that stands for one that is not loaded.

    Raises:
        UnsafePickleError: it is no class, but what no checkpoint needs.
    """
    if not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise UnsafePickleError(
            "a name that no class can have", found=repr(f"{module}.{name}"[:200]), where=where,
            helps="do not use this file: it may be an attack",
        )  # fmt: skip
    top = module.partition(".")[0]
    if (top in sys.stdlib_module_names or top in _SYSTEM_MODULES) and (module, name) not in _HARMLESS:
        raise UnsafePickleError(
            "a pickle asks for a function that no checkpoint needs; nothing was executed",
            found=f"{module}.{name}",
            where=where,
            helps="do not use this file: it may be an attack",
        )
    return placeholder_class(module, name)


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
        if is_plain(data):
            with suppress(_NotPlainError):
                return _PlainUnpickler(data, where).load()
        if not (len(data) <= _REPEATED and _is_bounded(data)):
            weigh(data, Budget(len(data), where))
        return SafeUnpickler(data, where).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way, from KeyError to MemoryError
        raise UnsafePickleError(
            "a pickle is damaged", found=shortened(f"{type(error).__name__}: {error}"), where=where
        ) from error


@lru_cache(maxsize=1024)
def _is_bounded(data: bytes) -> bool:
    """Whether a pickle passes `weigh`, which need not be asked again: tensors of one shape are pickled alike."""
    with suppress(Exception):  # whoever asks weighs it again, and tells
        weigh(data, Budget(len(data), ""))
        return True
    return False


def check_expansion(tree: Any, nbytes: int, where: str) -> None:
    """Refuse a tree that is small as a pickle, of `nbytes`, and endless for whoever walks through it.

    A pickle names an object once and may refer to it often: fifty lists of two references each have 2**50 leaves.

    Raises:
        UnsafePickleError: it contains itself, or is deeper than any state of a checkpoint.
        OverBudgetError: it is larger than its size explains.
    """
    known: dict[int, int] = {}

    def nodes(node: Any, depth: int) -> int:
        children = _children(node)
        if not children:
            return 1
        if id(node) not in known:
            if depth > _DEEPEST:
                raise ValueError(f"deeper than {_DEEPEST} levels")
            known[id(node)] = _MOST_NODES  # met again before it is counted: it contains itself
            known[id(node)] = 1 + sum(nodes(child, depth + 1) for child in children)
        if known[id(node)] >= _MOST_NODES:
            raise ValueError(f"more than {_MOST_NODES:,} elements")
        return known[id(node)]

    try:
        Budget(nbytes, where).spend(nodes(tree, 0), "what is referred to again and again")
    except ValueError as error:
        raise UnsafePickleError("a pickled state is endless", found=str(error), where=where) from error


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, (list, tuple, set, frozenset, collections.deque)):
        return list(node)
    if isinstance(node, Placeholder):
        origin = node._origin
        return [*node.arguments, *origin.state, *origin.items, *origin.entries]
    if isinstance(node, (argparse.Namespace, types.SimpleNamespace)):
        return list(vars(node).values())
    return []
