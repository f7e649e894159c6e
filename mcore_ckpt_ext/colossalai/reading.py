"""Reads ColossalAI's files on all ranks: complete, as their index says, and without executing code."""

from __future__ import annotations

import codecs
import io
import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._utils import _rebuild_tensor_v2

from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.errors import UnreadableCheckpointError, quantity

_UNTOUCHED = "nothing is written"
_SCALAR: Any = np.float64(0).__reduce__()[0]


def _scalar_of(module: str) -> Callable[..., Any]:
    """Return numpy's function for scalars as a function of a module.

    Up to 2.5, torch finds an accepted function only by its own name (torch/_weights_only_unpickler.py).
    """

    def scalar(*arguments: Any) -> Any:
        return _SCALAR(*arguments)

    scalar.__module__ = module
    scalar.__qualname__ = scalar.__name__
    return scalar


# Classes and functions in the pickle of a numpy scalar; the first function's module differs between numpy 1 and 2, and
# torch itself accepts the last since 2.5 (torch/_weights_only_unpickler.py).
_NUMPY: list[Any] = [
    *map(_scalar_of, ("numpy._core.multiarray", "numpy.core.multiarray")),
    np.dtype,
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64, np.int32, np.bool_)),
    codecs.encode,
]


def read_by_all(ranks: Ranks, file: Path, read: Callable[[Path], Any] | None = None) -> dict[Any, Any]:
    """Return all entries of a file, with its `_metadata`.

    They are memory-mapped, and read when a value is needed.

    Args:
        ranks: the ranks that read.
        file: the file.
        read: reads it: `load` by default, or `load_states`.

    Raises:
        ResumeRefusedError: on all ranks, if one cannot read them.
    """
    return ranks.agree_here(partial(read or load, file), "reading the checkpoint", _UNTOUCHED)


def read_sharded_by_all(
    ranks: Ranks, index: Path, exactly: bool = True, read: Callable[[Path], Any] | None = None
) -> dict[Any, Any]:
    """Return all entries of the files that an index names, if they match the index.

    Args:
        ranks: the ranks that read.
        index: the index.
        exactly: refuse files with more entries than the index lists. Pipeline stages each write a tied parameter's
            state, and the index lists only one of them (0.5.0, hybrid_parallel_checkpoint_io.py).
        read: reads a file: `load` by default, or `load_states`.

    Raises:
        ResumeRefusedError: on all ranks: a file is missing, or has other entries than the index lists.
    """

    def read_files() -> dict[Any, Any]:
        entries: dict[Any, Any] = {}
        expected: dict[str, set[str]] = {}
        for key, name in _read_index(index)["weight_map"].items():
            expected.setdefault(name, set()).add(key)
        for name, keys in expected.items():
            loaded = (read or load)(_listed_file(index, name))
            present = {str(key) for key in loaded}
            _refuse_other_entries(present if exactly else present & keys, keys, index.parent / name)
            entries.update((key, value) for key, value in loaded.items() if str(key) in keys)
        return entries

    return ranks.agree_here(read_files, "reading the checkpoint", _UNTOUCHED)


def read_optimizer_by_all(ranks: Ranks, index: Path, exactly: bool = True) -> dict[str, Any]:
    """Return the state dict of an optimizer: what `read_sharded_by_all` returns, and the param groups."""

    def groups() -> list[Any]:
        return list(load(_listed_file(index, _read_index(index)["metadata"].get("param_groups"))))

    states = read_sharded_by_all(ranks, index, exactly, load_states)
    return {"param_groups": ranks.agree_here(groups, "reading the param groups", _UNTOUCHED), "state": states}


def _read_index(index: Path) -> dict[str, dict[str, Any]]:
    """Return the metadata of an index, and the file of each entry.

    Raises:
        UnreadableCheckpointError: it is no index.
    """
    with _damage_named(index):
        content = json.loads(index.read_text())
        return {"metadata": dict(content.get("metadata", {})), "weight_map": dict(content["weight_map"])}


def _listed_file(index: Path, name: object) -> Path:
    """Return the path of a file that an index names.

    Raises:
        UnreadableCheckpointError: it does not exist, or lies outside of the index's folder.
    """
    file = index.parent / str(name)
    if file.name != name or not file.is_file():
        raise UnreadableCheckpointError("a file of the checkpoint is missing", found=str(name), where=str(index))
    return file


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    """Name the file that cannot be read; torch, json and safetensors mostly do not."""
    try:
        yield
    except Exception as error:  # a damaged file can make them fail in any way
        reason = str(error).partition("\n")[0]
        raise UnreadableCheckpointError(
            "a file of the checkpoint cannot be read",
            found=f"{type(error).__name__}: {reason}",
            where=str(file),
            hint="use another copy of the checkpoint; this file is damaged",
        ) from error


@contextmanager
def _numpy_accepted() -> Iterator[None]:
    """Let `torch.load` read numpy scalars within this scope; torch has a scope of its own only since 2.5."""
    accepted = [*torch.serialization.get_safe_globals()]
    torch.serialization.add_safe_globals(_NUMPY)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(accepted)


def load(file: Path) -> Any:
    """Read a file of tensors, plain values and numpy scalars; it cannot execute code.

    Raises:
        UnreadableCheckpointError: it is missing or damaged.
    """
    with _damage_named(file), _numpy_accepted():
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        # Files in the format before torch 1.6 are no archives, and cannot be memory-mapped.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


def load_states(file: Path) -> dict[Any, Any]:
    """Read a file of an optimizer's states; those of asynchronous saves are safetensors with flat names.

    ColossalAI's own function (0.5.0, utils/safetensors.py: ``load_flat``) executes the pickles in it.

    Raises:
        UnreadableCheckpointError: it is missing or damaged.
    """
    loaded: dict[Any, Any] = load(file)
    if file.suffix != ".safetensors":
        return loaded
    from safetensors import safe_open

    with _damage_named(file):
        with safe_open(file, framework="pt") as opened:
            pickled = json.loads((opened.metadata() or {}).get("non_tensor_keys", "[]"))
        for name in pickled:
            loaded[name] = _PlainUnpickler(io.BytesIO(loaded[name].numpy().tobytes())).load()
        groups = {name: loaded.pop(name) for name in ("param_groups",) if name in loaded}
        states: dict[Any, Any] = {}
        for name, value in loaded.items():
            _, key, kind = name.split(".")
            states.setdefault(int(key), {})[kind] = value
    return {**groups, "state": states} if groups else states


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values, numpy scalars and tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a function that cannot do harm, as torch's safe unpickler does."""
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        harmless: list[Any] = [*_NUMPY, OrderedDict, _rebuild_tensor_v2]
        by_name = {(callee.__module__, callee.__qualname__): callee for callee in harmless}
        if (module, name) not in by_name:
            raise pickle.UnpicklingError(f"it requests {module}.{name}, which no state needs")
        return by_name[module, name]


def _refuse_other_entries(present: set[str], expected: set[str], file: Path) -> None:
    missing = sorted(expected - present)
    more = sorted(present - expected)
    if missing or more:
        raise UnreadableCheckpointError(
            "a file has other entries than its index lists: it belongs to another save",
            found=", ".join([*(f"no {key}" for key in missing[:2]), *more[:2]]),
            expected=quantity(len(expected), "entry", "entries"),
            where=str(file),
            hint="use another checkpoint; this one was overwritten in part",
        )
