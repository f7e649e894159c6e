"""Converts unpickled states to JSON and back without loss.

Plain values remain unchanged. Every other value is an object whose only key begins with `$`.
"""

from __future__ import annotations

import argparse
import base64
import collections
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, format_value, quantity, shorten
from mcore_ckpt_ext.lazy_torch import is_dtype, is_tensor, torch
from mcore_ckpt_ext.storage.budget import check_keys, checked_numel
from mcore_ckpt_ext.storage.dtypes import DTYPE_NAMES, Dtype, dtype_named, name_of, tensor_of
from mcore_ckpt_ext.storage.pickle_stubs import Placeholder, origin_of, stub_class
from mcore_ckpt_ext.storage.safe_pickle import encode_latin1

_INTEGERS = {"bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
_DTYPES = {name for name in DTYPE_NAMES if name.startswith(("float", "bfloat", "complex")) or name in _INTEGERS}
_TYPES: Mapping[str, type] = {
    kind.__name__: kind for kind in (object, int, float, str, bool, list, dict, tuple, set, bytes)
}


def encode(tree: Any) -> Any:
    """Return a tree converted to JSON types.

    Raises:
        TypeError: the tree contains a type that checkpoints do not have.
    """
    if tree is None or isinstance(tree, (bool, int, str)) and type(tree) in (bool, int, str):
        return tree
    if type(tree) is float:
        return tree if math.isfinite(tree) else {"$float": repr(tree)}
    if type(tree) is list:
        return [encode(item) for item in tree]
    if type(tree) is dict and all(type(key) is str and not key.startswith("$") for key in tree):
        return {key: encode(value) for key, value in tree.items()}
    return _encode_tagged(tree)


def _encode_tagged(tree: Any) -> dict[str, Any]:
    """Return the object for a value that JSON does not have."""
    for tag, (kind, packed, _) in _CODECS.items():
        if type(tree) is kind:
            return {tag: packed(tree)}
    if is_dtype(tree):
        return {"$dtype": name_of(tree)}
    if is_tensor(tree):
        return {"$tensor": _tensor(tree)}
    if isinstance(tree, type) and issubclass(tree, Placeholder):
        return {"$class": [tree.pickled_module, tree.pickled_name]}
    if isinstance(tree, type) and _TYPES.get(tree.__name__) is tree:
        return {"$type": tree.__name__}
    if isinstance(tree, Placeholder):
        return {"$object": _placeholder(tree)}
    raise TypeError(f"a value of type {type(tree).__name__} cannot be written as JSON")


def decode(tree: Any) -> Any:
    """Return the tree that `encode` has converted.

    Raises:
        UnreadableCheckpointError: the tree was not written by `encode`.
    """
    try:
        return _decode(tree)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise UnreadableCheckpointError(
            "a JSON description is damaged", found=shorten(f"{type(error).__name__}: {error}")
        ) from error


def _decode(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((tag, content),) = tree.items()
        if tag in _CODECS:
            return _CODECS[tag][2](content)
        if tag in _OTHERS:
            return _OTHERS[tag](content)
    return {key: _decode(value) for key, value in tree.items()}


def _pairs(items: Any) -> list[list[Any]]:
    return [[encode(key), encode(value)] for key, value in items]


def _decode_pairs(content: Any) -> list[tuple[Any, Any]]:
    keys = _keys([key for key, _ in content])
    return list(zip(keys, (_decode(value) for _, value in content), strict=True))


def _keys(content: Any) -> list[Any]:
    keys: list[Any] = _decode(content)
    check_keys(keys)
    return keys


def _bytes(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor(tensor: torch.Tensor) -> dict[str, Any]:
    flat = tensor.detach().cpu().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {"dtype": name_of(tensor.dtype), "shape": list(tensor.shape), "data": _bytes(data)}


def _untensor(content: Any) -> torch.Tensor:
    flat = tensor_of(base64.b64decode(content["data"]), _dtype(content["dtype"]))
    shape = tuple(content["shape"])
    if checked_numel(shape) != flat.numel():
        raise ValueError(f"a tensor of shape {shape} with {quantity(flat.numel(), 'element')}")
    return flat.reshape(shape)


def _dtype(name: str) -> Dtype:
    # Torch's other dtypes have no plain elements: creating a quantized tensor from bytes crashes the process.
    if type(name) is not str or name not in _DTYPES:
        raise TypeError(f"{format_value(name)} is not a dtype of plain elements")
    return dtype_named(name)


def _placeholder(obj: Placeholder) -> dict[str, Any]:
    origin = origin_of(obj)
    return {
        "class": [obj.pickled_module, obj.pickled_name],
        "arguments": [encode(item) for item in obj.arguments],
        "called": origin.called,
        "member": origin.member,
        "state": [encode(state) for state in origin.state],
        "items": [encode(item) for item in origin.items],
        "entries": _pairs(origin.entries),
    }


def _class(names: Any) -> type[Placeholder]:
    module, name = names
    return stub_class(str(module), str(name), "a description in JSON")


def _unplaceholder(content: Any) -> Placeholder | bytes:
    if content["class"] == ["_codecs", "encode"]:
        return encode_latin1(*_decode(content["arguments"]))  # as in the first folders of this format
    built = Placeholder.__new__(_class(content["class"]), *_decode(content["arguments"]))
    origin = origin_of(built)
    origin.called = bool(content["called"])
    origin.member = content["member"]
    for state in content["state"]:
        built.__setstate__(_decode(state))
    origin.items.extend(_decode(content["items"]))
    origin.entries.extend(_decode_pairs(content["entries"]))
    return built


# For each tag: its exact type, and the functions that encode and decode its content.
_CODECS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$tuple": (tuple, lambda items: [encode(i) for i in items], lambda items: tuple(_decode(i) for i in items)),
    "$dict": (dict, lambda tree: _pairs(tree.items()), lambda pairs: dict(_decode_pairs(pairs))),
    "$ordered": (
        collections.OrderedDict,
        lambda tree: _pairs(tree.items()),
        lambda pairs: collections.OrderedDict(_decode_pairs(pairs)),
    ),
    "$default": (
        collections.defaultdict,
        lambda tree: [encode(tree.default_factory), _pairs(tree.items())],
        lambda content: collections.defaultdict(_decode(content[0]), _decode_pairs(content[1])),
    ),
    "$deque": (
        collections.deque,
        lambda items: [items.maxlen, [encode(i) for i in items]],
        lambda content: collections.deque(_decode(content[1]), content[0]),
    ),
    "$set": (set, lambda items: [encode(i) for i in sorted(items, key=repr)], lambda items: set(_keys(items))),
    "$frozenset": (
        frozenset,
        lambda items: [encode(i) for i in sorted(items, key=repr)],
        lambda items: frozenset(_keys(items)),
    ),
    "$bytes": (bytes, _bytes, base64.b64decode),
    "$bytearray": (bytearray, lambda data: _bytes(bytes(data)), lambda text: bytearray(base64.b64decode(text))),
    "$stream": (
        io.BytesIO,
        lambda stream: _bytes(stream.getvalue()),
        lambda text: io.BytesIO(base64.b64decode(text)),
    ),
    "$complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "$namespace": (
        argparse.Namespace,
        lambda space: {name: encode(value) for name, value in vars(space).items()},
        lambda content: argparse.Namespace(**{name: _decode(value) for name, value in content.items()}),
    ),
    "$dtype": (Dtype, name_of, _dtype),
}
_OTHERS: Mapping[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tensor": _untensor,
    "$class": _class,
    "$type": lambda name: _TYPES[name],
    "$object": _unplaceholder,
}
