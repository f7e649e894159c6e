"""Torch's dtypes by name, for pickles, indexes and records that are read without torch."""

from __future__ import annotations

import argparse
import collections
import types
from functools import cache
from typing import Any

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.pickle_stubs import Stateless

# Bytes of an element (c10/core/ScalarType.h, torch 2.4 to 2.15); dtypes below 8 bits use a byte each.
_ITEM_SIZES = {
    **ITEM_SIZE,
    **dict.fromkeys(("uint64", "complex64"), 8),
    **dict.fromkeys(("uint32", "complex32", "bcomplex32", "qint32"), 4),
    **dict.fromkeys(("uint16", "bits16"), 2),
    **dict.fromkeys(("qint8", "quint8", "quint4x2", "quint2x4", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8", "float4_e2m1fn_x2", "float8_e8m0fnu"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    "complex128": 16,
}
_ALIASES = {
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
}
DTYPE_NAMES = frozenset({*_ITEM_SIZES, *_ALIASES})
"""The names of dtypes in `torch`."""


class Dtype(Stateless):
    """A dtype of torch; `dtype_named` returns the only object for each.

    Attributes:
        name: name in `torch`.
        itemsize: bytes of an element.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.itemsize = _ITEM_SIZES[name]

    @property
    def torch(self) -> torch.dtype:
        """Torch's own object.

        Raises:
            AttributeError: the installed torch does not have this dtype.
        """
        dtype: torch.dtype = getattr(torch, self.name)
        return dtype

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the name, so that each process has one object for each dtype."""
        return dtype_named, (self.name,)

    def __repr__(self) -> str:
        return f"torch.{self.name}"


@cache
def _dtype(name: str) -> Dtype:
    return Dtype(name)


def dtype_named(name: str) -> Dtype:
    """Return the dtype for a name such as `bfloat16` or `half`.

    Raises:
        KeyError: the name is not in `DTYPE_NAMES`.
    """
    return _dtype(_ALIASES.get(name, name))


def name_of(dtype: torch.dtype | Dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


def tensor_of(data: bytes, dtype: Dtype) -> torch.Tensor:
    """Return the elements in bytes as a 1-D tensor with memory of its own."""
    # torch.frombuffer refuses an empty buffer.
    return torch.frombuffer(bytearray(data), dtype=dtype.torch) if data else torch.empty(0, dtype=dtype.torch)


def with_torch_dtypes(tree: Any) -> Any:
    """Return a copy of an unpickled state with dtypes of torch, to be passed to a framework."""
    if isinstance(tree, Dtype):
        return tree.torch
    kind = type(tree)
    if kind in (dict, collections.OrderedDict):
        return kind((with_torch_dtypes(key), with_torch_dtypes(value)) for key, value in tree.items())
    if kind in (list, tuple):
        return kind(map(with_torch_dtypes, tree))
    if kind in (argparse.Namespace, types.SimpleNamespace):
        return kind(**{name: with_torch_dtypes(value) for name, value in vars(tree).items()})
    return tree
