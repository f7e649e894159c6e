"""Files of the safetensors library: length of the header, header in JSON, elements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.planning.output import OutputFile
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, Extent
from mcore_ckpt_ext.storage.files import FolderReader

_HEADER_LIMIT = 100_000_000  # as the library
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_DTYPE_NAMES = {short: name for name, short in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Declared:
    """An array of a file to be written: its key, its shape in elements, its torch dtype by name."""

    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * ITEM_SIZE[self.dtype]


def lay_out_file(name: str, arrays: Sequence[Declared]) -> tuple[OutputFile, list[int]]:
    """The file, and the byte at which each array begins."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = [], 0
    for array in arrays:
        end = at + array.nbytes
        header[array.key] = {
            "dtype": _DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [at, end],
        }  # fmt: skip
        starts.append(at)
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the library aligns the elements to 8 bytes
    begin = 8 + len(text)
    file = OutputFile(name, begin + at, ((0, len(text).to_bytes(8, "little") + text),))
    return file, [begin + start for start in starts]


def read_header(reader: FolderReader, file: str) -> Iterator[tuple[str, tuple[int, ...], Extent]]:
    """(key, shape, where it lies) of every array of a file.

    Raises:
        UnreadableCheckpointError: it is no safetensors file, or shorter than it says.
    """
    size = reader.size(file)
    where = str(reader.folder / file)
    length = int.from_bytes(reader.read(file, 0, 8), "little") if size >= 8 else size
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UnreadableCheckpointError: the file is missing, or holds something else.
    """
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableCheckpointError(
            "a file of the checkpoint is damaged", found=str(error), where=str(path)
        ) from error
    return content


def json_file(name: str, content: object, *, last: bool = False) -> OutputFile:
    """A JSON file to be written."""
    text = json.dumps(content, indent=2).encode() + b"\n"
    return OutputFile(name, len(text), ((0, text),), last)
