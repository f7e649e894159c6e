"""The allowlist of names in pickles that this package writes, and the form that each may have.

Loading a written file runs the functions that its pickle names, so the source checkpoint must not choose them. Only
classes and functions of this list are written, with arguments of the types and sizes of intact checkpoints. Everything
else is refused here, or left out by callers that check first (`first_unwritable`).
"""

from __future__ import annotations

import argparse
import collections
import io
import types
import zipfile
from collections.abc import Callable
from math import prod
from typing import Any

from mcore_ckpt_ext.lazy_torch import is_dtype, is_layout, is_size, is_tensor
from mcore_ckpt_ext.storage.dtypes import DTYPE_NAMES, Dtype, name_of
from mcore_ckpt_ext.storage.pickle_stubs import Origin, Placeholder, origin_of
from mcore_ckpt_ext.storage.safe_pickle import SafeUnpickler
from mcore_ckpt_ext.storage.tensor_reference import STORAGE_NAMES, TensorReference
from mcore_ckpt_ext.storage.zip_directory import readable_records

Name = tuple[str, str]

# Python's own classes, by their names in protocol 2.
CLASSES: dict[object, Name] = {
    **{
        kind: ("__builtin__", kind.__name__)
        for kind in (object, float, complex, bool, list, dict, tuple, set, frozenset, bytes, bytearray, slice)
    },
    int: ("__builtin__", "long"),
    str: ("__builtin__", "unicode"),
    collections.OrderedDict: ("collections", "OrderedDict"),
    collections.defaultdict: ("collections", "defaultdict"),
    collections.deque: ("collections", "deque"),
    argparse.Namespace: ("argparse", "Namespace"),
    types.SimpleNamespace: ("types", "SimpleNamespace"),
    io.BytesIO: ("_io", "BytesIO"),
}
_END_OF_ARCHIVE = b"PK\x05\x06"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, slice)
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.OrderedDict, collections.deque)
_DTYPES: set[Name] = {("torch", name) for name in DTYPE_NAMES}

CHECKPOINT_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX: set[Name] = {
    *(
        (CHECKPOINT_METADATA, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_RECONSTRUCTED = {(module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")}
_SCALARS = {(module, "scalar") for module in ("numpy.core.multiarray", "numpy._core.multiarray")}
_NDARRAY = ("numpy", "ndarray")
_NUMPY_DTYPE = ("numpy", "dtype")
_ENCODE = ("_codecs", "encode")
_WRITABLE: set[Name] = {
    *CLASSES.values(),
    *_DTYPES,
    *_INDEX,
    *_RECONSTRUCTED,
    *_SCALARS,
    _NDARRAY,
    _NUMPY_DTYPE,
    _ENCODE,
    *(("torch", name) for name in STORAGE_NAMES.values()),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.serialization", "_get_layout"),
}


def check_writable(module: str, name: str) -> None:
    """Check that a written pickle may contain a name.

    Raises:
        TypeError: the name is not on the list.
    """
    if (module, name) not in _WRITABLE or not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise TypeError(f"{f'{module}.{name}'[:200]!r}")


def is_of_own_index(placeholder: Placeholder) -> bool:
    """Return whether an object belongs to an index that this package creates, not to a source checkpoint."""
    return (placeholder.pickled_module, placeholder.pickled_name) in _INDEX


def first_unwritable(tree: Any, unread_tensors: bool = False) -> str | None:
    """Return a description of the first object in a tree that may not be written; None if all may.

    Args:
        tree: a state of a checkpoint.
        unread_tensors: allow tensors whose elements have not been read.
    """
    seen: dict[int, Any] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if type(node) in _PLAIN or id(node) in seen or (unread_tensors and type(node) is TensorReference):
            continue
        seen[id(node)] = node
        children = _parts(node)
        if children is None:
            return _describe(node)
        waiting.extend(children)
    return None


def _parts(node: Any) -> list[Any] | None:
    """Return the children of a node; None if the node may not be written."""
    kind = type(node)
    if kind in (dict, collections.OrderedDict):
        return [*node.keys(), *node.values()]
    if kind in _CONTAINERS or is_size(node):
        return list(node)
    if kind is collections.defaultdict:
        return [node.default_factory, *node.keys(), *node.values()]
    if kind in (argparse.Namespace, types.SimpleNamespace):
        return [*vars(node).values()]
    is_allowed = kind in (Dtype, io.BytesIO) or is_dtype(node) or is_layout(node)
    is_allowed |= isinstance(node, type) and node in CLASSES
    is_allowed |= is_tensor(node) and name_of(node.dtype) in STORAGE_NAMES
    if is_allowed or (isinstance(node, Placeholder) and _is_in_its_form(node)):
        return []
    return None


def _describe(node: object) -> str:
    kind = node if isinstance(node, type) else type(node)
    if issubclass(kind, Placeholder):
        return f"{kind.pickled_module}.{kind.pickled_name}"[:200]
    return kind.__name__


def _is_in_its_form(node: Placeholder) -> bool:
    predicate = _FORMS.get((node.pickled_module, node.pickled_name))
    origin = origin_of(node)
    if predicate is None or not origin.called or origin.member is not None or origin.items or origin.entries:
        return False
    try:
        return predicate(node, origin)
    except (AttributeError, IndexError, TypeError, ValueError):
        return False


def _array(node: Placeholder, origin: Origin) -> bool:
    """Check the form of `ndarray.__reduce__`.

    It is `_reconstruct(ndarray, (0,), b"b")`, then version, shape, dtype, order and bytes.
    """
    kind, shape, mark = node.arguments
    state: Any = origin.state
    ((version, sizes, dtype, is_fortran, data),) = state
    numbers = all(type(size) is int and size >= 0 for size in sizes)
    return (
        _is_class(kind, _NDARRAY)
        and shape == (0,)
        and mark == b"b"
        and version == 1
        and type(sizes) is tuple
        and numbers
        and type(is_fortran) is bool
        and type(data) is bytes
        and len(data) == prod(sizes) * _item_size(dtype)
    )


def _scalar(node: Placeholder, origin: Origin) -> bool:
    dtype, data = node.arguments
    return not origin.state and type(data) is bytes and len(data) == _item_size(dtype)


def _numpy_dtype(node: Placeholder, origin: Origin) -> bool:
    """Check the form of `dtype.__reduce__` for numbers.

    It is `dtype("u4", False, True)`, then only the byte order.
    """
    code, align, copy = node.arguments
    plain = type(code) is str and code[:1] in "biuf" and code[1:] in ("1", "2", "4", "8")
    states = [(3, order, None, None, None, -1, -1, 0) for order in "<|="]
    return plain and align in (False, 0) and copy in (True, 1) and list(origin.state) in [[state] for state in states]


_FORMS: dict[Name, Callable[[Placeholder, Origin], bool]] = {
    **dict.fromkeys(_RECONSTRUCTED, _array),
    **dict.fromkeys(_SCALARS, _scalar),
    _NUMPY_DTYPE: _numpy_dtype,
}


def _is_class(kind: object, name: Name) -> bool:
    is_placeholder = isinstance(kind, type) and issubclass(kind, Placeholder)
    return is_placeholder and (kind.pickled_module, kind.pickled_name) == name  # type: ignore[attr-defined]


def _item_size(dtype: object) -> int:
    if isinstance(dtype, Placeholder) and _is_class(type(dtype), _NUMPY_DTYPE) and _is_in_its_form(dtype):
        return int(str(dtype.arguments[0])[1:])
    raise TypeError("no plain dtype")


class _OutputUnpickler(SafeUnpickler):
    """Reads a pickle that is about to be written, and accepts only names on the list."""

    def find_class(self, module: str, name: str) -> Any:
        check_writable(module, name)
        return super().find_class(module, name)


def check_output(data: bytes) -> Any:
    """Load a pickle before it is written, accepting only names on the list, and return its content.

    Raises:
        TypeError: the pickle contains another name.
    """
    return _OutputUnpickler(data, "what is to be written").load()


def has_unsafe_pickle(data: bytes) -> bool:
    """Return whether bytes that will be unpickled contain anything that may not be written.

    Empty bytes contain nothing. Transformer Engine unpickles the bytes of its extra states (module/base.py,
    `set_extra_state`, 1.x to 2.x).
    """
    try:
        pickled = pickle_in(data)
        if not pickled:
            return False
        # A second pickle may follow, which torch's oldest format would load as well.
        unpickler = _OutputUnpickler(pickled, "an extra state")
        state = unpickler.load()
        return unpickler.position != len(pickled) or first_unwritable(state, unread_tensors=True) is not None
    except Exception:  # noqa: BLE001  any error means that these bytes are not intact
        return True


def pickle_in(data: bytes) -> bytes:
    """Return the pickle in bytes: the bytes themselves, or the pickle of an unambiguous torch archive.

    Raises:
        ValueError, zipfile.BadZipFile: the archive is ambiguous.
    """
    if not data.startswith(b"PK"):
        return data
    if data.count(_END_OF_ARCHIVE) != 1 or data[-22:-18] != _END_OF_ARCHIVE:
        raise ValueError("an archive with more than one end")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = readable_records(archive)
        (record,) = (info for info in records if info.filename.rpartition("/")[2].casefold() == "data.pkl")
        if any(info.compress_type != zipfile.ZIP_STORED for info in records):
            raise ValueError("a compressed archive")
        return archive.read(record)
