"""The format `canonical`: model space itself, in safetensors, and everything else in one JSON file.

canonical-00001-of-00002.safetensors    arrays by `kind.name`
model.safetensors.index.json            which file holds which, as transformers lays it out
common.json                             arguments, iteration, parameter groups, random states
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.base import Checkpoint, OptimizerState
from mcore_ckpt_ext.formats.stacking import ShardedKey
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.output import Output, OutputFile, Placed, Record
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, Extent, StoredSlice, WantedSlice
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.json_tree import decode, encode

NAME = "canonical"
COMMON_FILE = "common.json"
INDEX_FILE = "model.safetensors.index.json"
FILE_BYTES = 4 << 30
_MARK = "mcore_ckpt_ext canonical"
_VERSION = 1
_HEADER_LIMIT = 100_000_000  # as the safetensors library

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_DTYPE_NAMES = {short: name for name, short in _DTYPES.items()}


def is_canonical(folder: Path) -> bool:
    """Whether a folder is in this format."""
    return (folder / COMMON_FILE).exists() and (folder / INDEX_FILE).exists()


class CanonicalCheckpoint(Checkpoint):
    """A folder in `canonical`."""

    format = NAME

    def __init__(self, folder: Path, witnesses: Sequence[ParameterOrder] = ()) -> None:
        super().__init__(folder, witnesses)
        self._about = _json(folder / COMMON_FILE)
        if self._about.get("format") != _MARK or self._about.get("version") != _VERSION:
            raise UnsupportedCheckpointError(
                "this is no canonical checkpoint that this version reads",
                found=f"{self._about.get('format')}, version {self._about.get('version')}",
                expected=f"{_MARK}, version {_VERSION}",
                where=str(folder / COMMON_FILE),
            )
        self._arrays = _Arrays(self.reader, folder)

    @cached_property
    def common(self) -> dict[str, Any]:
        """See the base class."""
        return dict(decode(self._about["common"]))

    @property
    def weights(self) -> _Arrays:
        """See the base class."""
        return self._arrays

    @property
    def optimizer_format(self) -> str | None:
        """See the base class."""
        return NAME if self._arrays.kinds else None

    @property
    def optimizer(self) -> OptimizerState:
        """See the base class."""
        return _Optimizer(self._arrays)

    @property
    def experts_apart(self) -> bool:
        """See the base class."""
        return bool(self._about["experts_apart"])

    def sharded_keys(self) -> Mapping[str, ShardedKey]:
        """See the base class; the source's own are recorded."""
        return {name: (str(key), tuple(index)) for name, (key, index) in self._about["sharded_keys"].items()}

    def param_groups(self) -> list[dict[str, Any]]:
        """See the base class."""
        return list(decode(self._about["param_groups"]))

    def grad_scaler(self) -> dict[str, Any] | None:
        """See the base class."""
        scaler = decode(self._about["grad_scaler"])
        return None if scaler is None else dict(scaler)

    def extra_states(self) -> Mapping[str, Any]:
        """See the base class."""
        return dict(decode(self._about["extra_states"]))

    def random_states(self) -> Mapping[tuple[int, ...], Any]:
        """See the base class."""
        return {tuple(place): decode(state) for place, state in self._about["random_states"]}

    def archives(self) -> Iterator[tuple[str, int, int]]:
        """See the base class: there are none."""
        return iter(())


class _Arrays:
    """All arrays of a folder by (kind, name); as `Weights`, those of the kind `weight`."""

    def __init__(self, reader: FolderReader, folder: Path) -> None:
        self._tensors: dict[tuple[str, str], tuple[LogicalTensor, Extent]] = {}
        for file in sorted(set(_json(folder / INDEX_FILE)["weight_map"].values())):
            for key, tensor, extent in _read_header(reader, str(file)):
                kind, _, name = key.partition(".")
                self._tensors[kind, name] = (LogicalTensor(name, tensor, extent.dtype), extent)
        self.kinds = tuple(dict.fromkeys(kind for kind, _ in self._tensors if kind != WEIGHT))

    def names(self) -> list[str]:
        """Names of the weights."""
        return [name for kind, name in self._tensors if kind == WEIGHT]

    def state_names(self) -> list[str]:
        """Names of the parameters with optimizer state."""
        return list(dict.fromkeys(name for kind, name in self._tensors if kind != WEIGHT))

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """See `planning.plan.Source`."""
        found = self._tensors.get((kind, name))
        return found[0] if found else None

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """See `planning.plan.Source`."""
        found = self._tensors.get((kind, name))
        if found is None:
            return []
        tensor, extent = found
        return [StoredSlice(Slice.whole((Region.whole(name, tensor.shape),)), extent, 0)]


class _Optimizer:
    """The arrays that are not weights."""

    def __init__(self, arrays: _Arrays) -> None:
        self.kinds = arrays.kinds
        self.logical_tensor = arrays.logical_tensor
        self.stored = arrays.stored
        self.names = arrays.state_names

    def witnesses(self) -> list[str]:
        """Where the layout is known from."""
        return ["the arrays' own names"]

    def lost_elements(self) -> dict[str, int]:
        """None: they would not have been written."""
        return {}


def canonical_output(checkpoint: Checkpoint) -> Output:
    """The files of a checkpoint in this format, and where each tensor goes."""
    batches: list[list[tuple[str, str, LogicalTensor]]] = [[]]
    size = 0
    for kind in checkpoint.kinds():
        for name in checkpoint.names(kind):
            tensor = checkpoint.logical_tensor(kind, name)
            if tensor is None:
                raise UnsupportedCheckpointError("the checkpoint lacks a tensor that it names", where=f"{kind} {name}")
            nbytes = prod(tensor.shape) * ITEM_SIZE[tensor.dtype]
            if batches[-1] and size + nbytes > FILE_BYTES:
                batches.append([])
                size = 0
            batches[-1].append((kind, name, tensor))
            size += nbytes
    files: list[OutputFile] = []
    records: list[Record] = []
    weight_map: dict[str, str] = {}
    for number, batch in enumerate(batches, 1):
        file, found = _safetensors(f"{NAME}-{number:05d}-of-{len(batches):05d}.safetensors", batch)
        files.append(file)
        records.extend(found)
        weight_map |= {f"{kind}.{name}": file.name for kind, name, _ in batch}
    total = sum(record.nbytes for record in records)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files += [_json_file(INDEX_FILE, index), replace(_json_file(COMMON_FILE, _about(checkpoint)), last=True)]
    return Output(files, records)


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything beside the arrays."""
    return {
        "format": _MARK,
        "version": _VERSION,
        "iteration": checkpoint.iteration,
        "source": {
            "format": checkpoint.format,
            "optimizer_format": checkpoint.optimizer_format,
            "layout": str(checkpoint.layout),
        },
        "experts_apart": checkpoint.experts_apart,
        "sharded_keys": {name: [key, list(index)] for name, (key, index) in checkpoint.sharded_keys().items()},
        "param_groups": encode(checkpoint.param_groups() if checkpoint.optimizer_format else []),
        "grad_scaler": encode(checkpoint.grad_scaler() if checkpoint.optimizer_format else None),
        "extra_states": encode(dict(checkpoint.extra_states())),
        "random_states": [[list(place), encode(state)] for place, state in checkpoint.random_states().items()],
        "common": encode({key: value for key, value in checkpoint.common.items() if key != "optimizer"}),
    }


def _safetensors(name: str, batch: Sequence[tuple[str, str, LogicalTensor]]) -> tuple[OutputFile, list[Record]]:
    """A file of the format of the safetensors library: length of the header, header in JSON, elements."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for kind, tensor_name, tensor in batch:
        end = at + prod(tensor.shape) * ITEM_SIZE[tensor.dtype]
        entry = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        header[f"{kind}.{tensor_name}"] = entry
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the library aligns the elements to 8 bytes
    begin = 8 + len(text)
    records = []
    for kind, tensor_name, tensor in batch:
        low, _ = header[f"{kind}.{tensor_name}"]["data_offsets"]
        part = Slice.whole((Region.whole(tensor_name, tensor.shape),))
        wanted = WantedSlice(kind, part, {tensor_name: tensor})
        records.append(Record(name, begin + low, tensor.dtype, part.numel, (Placed(0, wanted),)))
    return OutputFile(name, begin + at, ((0, len(text).to_bytes(8, "little") + text),)), records


def _read_header(reader: FolderReader, file: str) -> Iterator[tuple[str, tuple[int, ...], Extent]]:
    """(key, shape, where it lies) of every array of a file.

    Raises:
        UnreadableCheckpointError: it is no safetensors file, or shorter than it says.
    """
    size = reader.size(file)
    length = int.from_bytes(reader.read(file, 0, 8), "little")
    where = str(reader.folder / file)
    if length > min(_HEADER_LIMIT, size - 8):
        raise UnreadableCheckpointError("the header is longer than the file", found=length, expected=size, where=where)
    try:
        header = json.loads(reader.read(file, 8, length))
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            shape = tuple(int(axis) for axis in entry["shape"])
            low, high = (8 + length + int(place) for place in entry["data_offsets"])
            dtype = _DTYPE_NAMES[entry["dtype"]]
            if min(shape, default=0) < 0 or high - low != prod(shape) * ITEM_SIZE[dtype] or low < 8 or high > size:
                raise ValueError(f"{key} would lie at {low}:{high} of {size} bytes")
            yield key, shape, Extent(file, low, high - low, dtype, prod(shape), is_raw=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableCheckpointError("a safetensors file is damaged", found=str(error), where=where) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableCheckpointError(
            "a file of the checkpoint is damaged", found=str(error), where=str(path)
        ) from error
    return content


def _json_file(name: str, content: Mapping[str, Any]) -> OutputFile:
    text = json.dumps(content, indent=1).encode()
    return OutputFile(name, len(text), ((0, text),))
