"""Reads the extra states that modules of Transformer Engine pickle, as data, and writes them again.

Source: `get_extra_state` (transformer_engine/pytorch/module/base.py) writes a plain pickle in 2.0 to 2.20.2, and a
stream with a torch archive in 1.x. `_encode_extra_state` (megatron/core/extensions/transformer_engine.py, core_v0.12.1
to 0.19.2) pickles the same for each expert. A state contains scales, amax histories, and the recipe, an object of one
of a few classes that are written by name. In a plain pickle a tensor is a call with the bytes of its storage in torch's
oldest format (`torch.storage._load_from_bytes`).

The original bytes are never copied, because loading them runs the functions that they name.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.lazy_torch import is_tensor, torch
from mcore_ckpt_ext.storage.archive_writer import archive_of
from mcore_ckpt_ext.storage.budget import Budget
from mcore_ckpt_ext.storage.dtypes import tensor_of
from mcore_ckpt_ext.storage.pickle_allowlist import Name, pickle_in
from mcore_ckpt_ext.storage.pickle_stubs import Function, Placeholder, origin_of, placeholder_class
from mcore_ckpt_ext.storage.pickling import TreePickler
from mcore_ckpt_ext.storage.safe_pickle import SafeUnpickler
from mcore_ckpt_ext.storage.tensor_reference import StorageType
from mcore_ckpt_ext.storage.zip_directory import readable_records

_RECIPES = "transformer_engine.common.recipe"
_HELPER = (_RECIPES, "_FormatHelper")
_FORMAT = (_RECIPES, "Format")
# Dataclasses of plain settings, pickled with their attributes.
_SETTINGS: set[Name] = {
    *(
        (_RECIPES, name)
        for name in (
            "DelayedScaling",
            "Float8CurrentScaling",
            "Float8BlockScaling",
            "MXFP8BlockScaling",
            "NVFP4BlockScaling",
            "MMParams",
            "QParams",
        )
    ),
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
}
# Members of `Format` by name, as Python 3.11 pickles them, and the numbers of which they consist.
_MEMBERS = {"E2M1": (6, 6), "E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344)}
_LOAD_FROM_BYTES: Name = ("torch.storage", "_load_from_bytes")
_BYTES_LOADERS = {_LOAD_FROM_BYTES, ("megatron.core.safe_globals", "safe_load_from_bytes")}
_PLAIN = {("collections", "OrderedDict"), ("torch", "Size"), ("torch._utils", "_rebuild_tensor_v2")}
_PLAIN |= {(module, name) for module in ("builtins", "__builtin__") for name in ("getattr", "dict", "list", "tuple")}
# The first bytes of torch's oldest format: two pickled numbers (torch/serialization.py, `_legacy_save`).
_OLDEST_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
_DEEPEST = 20
_STEPS_TO_COPY = 16
PROTOCOL = 4


class UnknownStateError(Exception):
    """An extra state that modules of Transformer Engine do not write."""


def read_state(content: bytes) -> dict[str, Any] | None:
    """Read the state that a module has stored, with its tensors; recipes become placeholders.

    Returns:
        None if the module has stored nothing.

    Raises:
        UnknownStateError: the bytes are not such a state.
    """
    try:
        archive = _Records(content) if content.startswith(b"PK") else None
        state = _Unpickler.load_whole(pickle_in(content), archive) if content else None
        if state is not None and (type(state) is not dict or not all(type(key) is str for key in state)):
            raise TypeError(f"a {type(state).__name__}")
        _check(state)
    except Exception as error:  # damaged bytes can cause any error
        raise UnknownStateError(f"{type(error).__name__}: {error}") from error
    return state


def write_state(content: Mapping[str, Any], stream: bool) -> Any:
    """Return a state in the form that a module loads.

    Args:
        content: the state.
        stream: return a stream with a torch archive, as in 1.x, instead of a tensor with the bytes of a pickle.

    Raises:
        UnknownStateError: the state has a recipe, which streams of 1.x do not contain.
    """
    buffer = io.BytesIO()
    if stream:
        try:
            return io.BytesIO(archive_of(dict(content)))
        except UnsupportedCheckpointError as error:
            raise UnknownStateError(str(error)) from error
    _Pickler(buffer, PROTOCOL).dump(dict(content))
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two recipes or settings are equal."""
    return bool(_comparable(one) == _comparable(other))


def _comparable(node: Any) -> Any:
    if isinstance(node, Placeholder):
        # A recipe caches its own description.
        states: list[Any] = [_comparable(state) for state in origin_of(node).state]
        for state in states:
            state.pop("_cached_repr", None)
        return node.pickled_module, node.pickled_name, _comparable(list(node.arguments)), states
    if type(node) is dict:
        return {key: _comparable(value) for key, value in node.items()}
    return [_comparable(part) for part in node] if type(node) in (list, tuple) else node


def _check(node: Any, depth: int = 0) -> None:
    """Refuse everything except data and recipes in their known form.

    Raises:
        TypeError: the state contains something else.
    """
    if depth > _DEEPEST:
        raise TypeError("a state of states")
    if type(node) in (type(None), bool, int, float, str) or is_tensor(node):
        return
    if isinstance(node, Placeholder):
        parts = _parts_of(node)
    elif type(node) is dict:
        parts = [*node.keys(), *node.values()]
    elif type(node) in (list, tuple):
        parts = list(node)
    else:
        raise TypeError(f"a {type(node).__name__}")
    for part in parts:
        _check(part, depth + 1)


def _parts_of(node: Placeholder) -> list[Any]:
    name = (node.pickled_module, node.pickled_name)
    origin = origin_of(node)
    if origin.items or origin.entries or len(origin.state) > 1:
        raise TypeError(f"{name} with more in it than attributes")
    if name in _SETTINGS and not node.arguments and all(type(state) is dict for state in origin.state):
        return list(origin.state)
    if name == _HELPER and [type(number) for number in node.arguments] in ([int, int], [float, float]):
        return list(origin.state)
    if name == _FORMAT and not origin.state and len(node.arguments) == 1:
        (value,) = node.arguments
        if isinstance(value, Placeholder) and (value.pickled_module, value.pickled_name) == _HELPER:
            return [value]
    raise TypeError(f"{name} in another form")


class _Records:
    """The tensors of a torch archive in memory.

    Raises:
        ValueError: records are compressed, or together larger than the archive.
    """

    def __init__(self, content: bytes) -> None:
        self.nbytes = len(content)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            records = readable_records(archive)
            sizes = sum(record.file_size for record in records)
            if sizes > len(content) or any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise ValueError("an archive that holds more than it has bytes")
            self._data = {record.filename.partition("/")[2]: archive.read(record) for record in records}

    def storage(self, key: object) -> bytes:
        return self._data[f"data/{key}"]


class _Unpickler(SafeUnpickler):
    """Resolves only the names that such a state may contain, and reads tensors."""

    def __init__(self, data: bytes, archive: _Records | None) -> None:
        super().__init__(data, "an extra state")
        self._archive = archive
        if archive is not None:
            self.budget = Budget(archive.nbytes, "an extra state")

    @classmethod
    def load_whole(cls, data: bytes, archive: _Records | None) -> Any:
        """Load a pickle, which must end where the data ends."""
        unpickler = cls(data, archive)
        state = unpickler.load()
        if unpickler.position != len(data):
            raise ValueError("something follows the pickle")
        return state

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _BYTES_LOADERS:
            return _load_from_bytes
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return Function(self._tensor)
        if module == "torch" and name.endswith("Storage"):
            return super().find_class(module, name)
        if (module, name) == _FORMAT:
            return _format
        if (module, name) in {*_SETTINGS, _HELPER}:
            return placeholder_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _format_member
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise TypeError(f"{module}.{name}"[:200])

    def persistent_load(self, reference: Any) -> Any:
        tag, kind, key, _, numel, *_ = reference
        if tag != "storage" or not isinstance(kind, StorageType) or self._archive is None:
            raise TypeError("a reference to something else than a record")
        data = self._archive.storage(key)
        self.budget.spend(_STEPS_TO_COPY * len(data), "copies of its storages")
        return _storage_of(data, kind, numel)

    def _tensor(self, storage: object, offset: Any, shape: Any, stride: Any, *_: object) -> torch.Tensor:
        numel = math.prod(shape)
        if type(storage) is not torch.Tensor or len(shape) != len(stride) or min((offset, *shape, *stride)) < 0:
            raise TypeError("a tensor that cannot be")
        if numel > storage.numel():  # elements of such a view overlap
            raise ValueError("a tensor larger than its storage")
        self.budget.spend(_STEPS_TO_COPY * numel * storage.itemsize, "copies of its tensors")
        return torch.as_strided(storage, tuple(shape), tuple(stride), offset).contiguous()


class _NestedUnpickler(_Unpickler):
    """Reads a tensor in the bytes of a file, which contains no further file, as levels multiply work."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _BYTES_LOADERS:
            raise TypeError("a file within a file")
        return super().find_class(module, name)


class _OldestFormatUnpickler(_NestedUnpickler):
    """Resolves the persistent references of torch's oldest format to dtype and length of a storage."""

    def persistent_load(self, reference: Any) -> Any:
        tag, kind, _, _, numel, view = reference
        if tag != "storage" or not isinstance(kind, StorageType) or view is not None:
            raise TypeError("a reference to something else than a storage")
        return kind, numel


@Function
def _load_from_bytes(data: object) -> torch.Tensor:
    """Return the storage or tensor in the bytes of a file that is embedded in a pickle."""
    if type(data) is not bytes:
        raise TypeError("a storage of something else than bytes")
    is_archive = data.startswith(b"PK")
    tensor = _NestedUnpickler.load_whole(pickle_in(data), _Records(data)) if is_archive else _read_oldest_format(data)
    if type(tensor) is not torch.Tensor:
        raise TypeError("bytes of something else than a tensor")
    return tensor


def _read_oldest_format(data: bytes) -> torch.Tensor:
    """Read a storage in the oldest format.

    After the first bytes come the system's properties, the storage, a list of its key, its length and its elements.
    """
    if not data.startswith(_OLDEST_MAGIC):
        raise ValueError("no storage")
    rest = data[len(_OLDEST_MAGIC) :]
    objects = []
    for _ in range(3):
        unpickler = _OldestFormatUnpickler(rest, None)
        objects.append(unpickler.load())
        rest = rest[unpickler.position :]
    kind, numel = objects[1]
    if type(numel) is not int or int.from_bytes(rest[:8], "little") != numel:
        raise ValueError("a storage of another length")
    return _storage_of(rest[8:], kind, numel)


def _storage_of(data: bytes, kind: StorageType, numel: object) -> torch.Tensor:
    if type(numel) is not int or len(data) != numel * kind.dtype.itemsize:
        raise ValueError("a storage of another length")
    return tensor_of(data, kind.dtype)


@Function
def _format(value: object) -> Placeholder:
    return placeholder_class(*_FORMAT)(value)


@Function
def _format_member(owner: object, name: object) -> Placeholder:
    """Return a member of `Format`, given the call with which Python 3.11 pickles it."""
    if owner is not _format or name not in _MEMBERS:
        raise TypeError("an attribute")
    return placeholder_class(*_FORMAT)(placeholder_class(*_HELPER)(*_MEMBERS[str(name)]))


class _Pickler(TreePickler):
    """Writes tensors with their elements, and recipes by name."""

    def _save_tensor(self, leaf: Any) -> None:
        if self._write_memoized(leaf):
            return
        self._save_global(self._placeholder(*_LOAD_FROM_BYTES))
        self.save((archive_of(leaf),))
        self.write(pickle.REDUCE)
        self.memoize(leaf)

    def _check_writable(self, module: str, name: str) -> None:
        if (module, name) not in {*_SETTINGS, _HELPER, _FORMAT, _LOAD_FROM_BYTES}:
            raise TypeError(f"{module}.{name}")

    def _check_placeholder(self, obj: Placeholder) -> None:
        _check(obj)
