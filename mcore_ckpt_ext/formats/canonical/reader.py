"""Reads the format `canonical`: model space in safetensors files, and all else in one JSON file.

A folder contains:

    canonical-00001-of-00002.safetensors    arrays by `kind.name`, and their CRC-32s as `checksums`: one number for each
                                            array of the file, in the order of their keys; another program may leave
                                            them out
    model.safetensors.index.json            the file of each array, in transformers' layout
    common.json                             arguments, iteration, parameter groups, random states
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import (
    UnreadableCheckpointError,
    UnsupportedCheckpointError,
    format_value,
    join_some,
    quantity,
    shorten,
)
from mcore_ckpt_ext.formats.open_options import DEFAULT_OPTIONS, OpenOptions
from mcore_ckpt_ext.formats.parts import Files, Job, States, StoredOptimizer, StoredWeights
from mcore_ckpt_ext.formats.reader import FormatReader
from mcore_ckpt_ext.formats.unread_state import COMMON_KEYS, OTHER, UnreadState, merge_entries, unread_common_state
from mcore_ckpt_ext.formats.view import OpenedFormat
from mcore_ckpt_ext.model_space.names import ShardedKey, name_at
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.derived_masters import with_masters
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.planning.plan import StoredOnce, StoredSlice
from mcore_ckpt_ext.storage.budget import check_keys
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.json_text import read_json
from mcore_ckpt_ext.storage.json_tree import decode
from mcore_ckpt_ext.storage.safetensors import check_index, list_arrays

NAME = "canonical"
COMMON_FILE = "common.json"
INDEX_FILE = "model.safetensors.index.json"
MARK = "mcore_ckpt_ext canonical"
VERSION = 1
CHECKSUMS = "checksums"
CHECKSUM_BYTES = 4
_OF_EVERY_FOLDER = frozenset(
    {
        "chain",
        "common",
        "experts_apart",
        "extra_states",
        "grad_scaler",
        "param_groups",
        "random_states",
        "sharded_keys",
        "source",
        "undistributed",
    }
)


class CanonicalCheckpoint(FormatReader):
    """A folder in the format `canonical`."""

    name = NAME
    _weights: _Arrays

    @classmethod
    @override
    def recognizes(cls, stored: FolderIndex) -> bool:
        return (stored.folder / COMMON_FILE).exists() and (stored.folder / INDEX_FILE).exists()

    @classmethod
    @override
    def may_be_replaced(cls, folder: Path) -> bool:
        cls(folder)  # checks the marker
        return True

    def __init__(self, folder: Path, options: OpenOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(folder, options)
        self._about = read_json(folder / COMMON_FILE)
        if self._about.get("format") != MARK or self._about.get("version") != VERSION:
            raise UnsupportedCheckpointError(
                "this version cannot read this canonical checkpoint",
                found=f"{format_value(self._about.get('format'))}, version {format_value(self._about.get('version'))}",
                expected=f"{MARK}, version {VERSION}",
                where=str(folder / COMMON_FILE),
            )
        missing = sorted(_OF_EVERY_FOLDER - self._about.keys())
        if missing:
            raise UnreadableCheckpointError(
                "the file that describes the arrays is incomplete",
                found=f"no {join_some(missing)}",
                where=str(folder / COMMON_FILE),
                hint="this file was edited, or is damaged: convert the source again",
            )
        self._weights = _Arrays(self.files.reader, folder)

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        return replace(super().format, is_of_convert=True)

    @cached_property
    @override
    def files(self) -> Files:
        return replace(super().files, raw_arrays=lambda: self._weights.raw_arrays(), unread=self._unread)

    @cached_property
    @override
    def model(self) -> StoredWeights:
        return replace(super().model, sharded_keys=self._sharded_keys)

    @cached_property
    @override
    def optimizer(self) -> StoredOptimizer:
        about = self._about
        return StoredOptimizer(
            state=self._optimizer_state,
            format=lambda: NAME if self._weights.kinds or about["chain"] else None,
            has_expert_optimizer=lambda: bool(about["experts_apart"]),
            param_groups=lambda: list(decode(about["param_groups"])),
            chained_optimizer_settings=lambda: list(decode(about["chain"])),
            grad_scaler=self._grad_scaler,
        )

    @cached_property
    @override
    def job(self) -> Job:
        source = self._about["source"]
        return replace(super().job, is_release=isinstance(source, Mapping) and source.get("released") is True)

    @cached_property
    @override
    def states(self) -> States:
        return States(lambda: dict(decode(self._about["extra_states"])), self._random_states)

    @override
    def _read_common(self) -> dict[str, Any]:
        return dict(decode(self._about["common"]))

    def _optimizer_state(self) -> OptimizerState:
        undistributed = frozenset(map(str, self._about["undistributed"]))
        return with_masters(_Optimizer(self._weights, undistributed), self._weights, lambda: self.job.models().weights)

    def _sharded_keys(self) -> Mapping[str, ShardedKey]:
        """Return the recorded keys of the source.

        Raises:
            UnreadableCheckpointError: a key belongs to another name.
        """
        keys = {name: (str(key), tuple(index)) for name, (key, index) in self._about["sharded_keys"].items()}
        for name, (key, index) in keys.items():
            if name_at(key, index) != name:
                raise UnreadableCheckpointError(
                    "a sharded key belongs to another tensor",
                    found=f"{format_value(key)} at {format_value(index)}",
                    expected=shorten(name),
                    where=str(self.folder / COMMON_FILE),
                    hint="this file is damaged: convert the source again",
                )
        return keys

    def _grad_scaler(self) -> dict[str, Any] | None:
        scaler = decode(self._about["grad_scaler"])
        return None if scaler is None else dict(scaler)

    def _random_states(self) -> Mapping[tuple[int, ...], Any]:
        places = [tuple(place) for place, _ in self._about["random_states"]]
        check_keys(places)
        return dict(zip(places, (decode(state) for _, state in self._about["random_states"]), strict=True))

    def _unread(self, *, objects: bool = True) -> list[UnreadState]:
        """Return tensors of the common state, and files that the index does not list.

        All listed arrays are read.
        """
        paths = (path for path in sorted(self.folder.glob("*.safetensors")) if path.name not in self._weights.files)
        strays = [UnreadState(path.name, OTHER, path.stat().st_size) for path in paths]
        return merge_entries([*unread_common_state(self.job.common(), COMMON_KEYS), *strays])


class _Arrays(StoredOnce):
    """All arrays of a folder by (kind, name); the methods of `Weights` return those of the kind `weight`."""

    def __init__(self, reader: FolderReader, folder: Path) -> None:
        self._tensors: dict[tuple[str, str], tuple[LogicalTensor, RawArray]] = {}
        listed = {str(key): str(file) for key, file in read_json(folder / INDEX_FILE)["weight_map"].items()}
        file_of: dict[str, str] = {}
        self.files = frozenset(listed.values())
        for file in sorted(self.files):
            for key, tensor, extent in _with_checksums(reader, file):
                kind, _, name = key.partition(".")
                self._tensors[kind, name] = (LogicalTensor(name, tensor, extent.dtype), extent)
                file_of[key] = file
        hint = "files were edited, or are of two checkpoints: convert the source again"
        check_index(listed, file_of, folder / INDEX_FILE, hint)
        self.kinds = tuple(dict.fromkeys(kind for kind, _ in self._tensors if kind != WEIGHT))

    def raw_arrays(self) -> Iterator[RawArray]:
        """Yield all arrays, each with its checksum if it has one."""
        return (extent for _, extent in self._tensors.values())

    def names(self) -> list[str]:
        """Return the names of the weights."""
        return [name for kind, name in self._tensors if kind == WEIGHT]

    def state_names(self, of_kind: str | None) -> list[str]:
        """Return the names of the parameters with optimizer state of a kind, or of any kind if None."""
        names = (name for kind, name in self._tensors if kind != WEIGHT and of_kind in (None, kind))
        return list(dict.fromkeys(names))

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name, shape and dtype of a tensor; None if the folder does not contain it."""
        entry = self._tensors.get((kind, name))
        return entry[0] if entry else None

    @override
    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        entry = self._tensors.get((kind, name))
        if entry is None:
            return []
        tensor, extent = entry
        return [StoredSlice(Slice.whole((Region.whole(name, tensor.shape),)), extent, 0)]


def _with_checksums(reader: FolderReader, file: str) -> list[tuple[str, tuple[int, ...], RawArray]]:
    """Return (key, shape, location) of every array of a file.

    Raises:
        UnreadableCheckpointError: the file is damaged, or the number of checksums differs from that of arrays.
    """
    entries = list_arrays(reader, file)
    arrays = sorted(entry for entry in entries if entry[0] != CHECKSUMS)
    checksums = next((extent for key, _, extent in entries if key == CHECKSUMS), None)
    if checksums is None:
        return arrays
    if checksums.length != CHECKSUM_BYTES * len(arrays):
        raise UnreadableCheckpointError(
            "a file of a canonical checkpoint does not have one checksum for each array",
            found=f"{quantity(checksums.length, 'byte')} of checksums, {quantity(len(arrays), 'array')}",
            where=str(reader.folder / file),
            hint="this file was edited, or is damaged: convert the source again",
        )
    stored = struct.unpack(f"<{len(arrays)}I", reader.read(file, checksums.offset, checksums.length))
    return [(key, shape, extent._replace(crc=crc)) for (key, shape, extent), crc in zip(arrays, stored, strict=True)]


class _Optimizer(OptimizerState):
    """The arrays other than the weights."""

    def __init__(self, arrays: _Arrays, undistributed: frozenset[str]) -> None:
        self.kinds = arrays.kinds
        self._arrays = arrays
        self._undistributed = undistributed

    @override
    def is_distributed(self, name: str) -> bool:
        return name not in self._undistributed

    @override
    def names(self, kind: str | None = None) -> list[str]:
        return self._arrays.state_names(kind)

    @override
    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        return self._arrays.logical_tensor(kind, name)

    @override
    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return self._arrays.stored_slices(kind, name)
