"""Safetensors files: the length of the header, the header in JSON, the elements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import (
    UnreadableCheckpointError,
    UnsupportedCheckpointError,
    format_value,
    shorten,
    with_indefinite_article,
)
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.planning.write_plan import OutputFile
from mcore_ckpt_ext.storage.budget import checked_numel, whole_number
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.json_text import parse_json

WRITER = "mcore_ckpt_ext"
"""The writer in the header of every file of this package, which identifies it."""
SUFFIX = ".safetensors"
METADATA = "__metadata__"
"""The key of the header that describes the file instead of an array."""
_CHECKSUMS = "mcore_ckpt_ext.crc32"
"""The key in `__metadata__` with the CRC-32 of each array in hexadecimal, in the order of their names."""
_DIGITS = 8
_HEADER_LIMIT = 100_000_000  # as in the library
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
# Exponents of two (E8M0) are read as their bytes: torch has their dtype since 2.7 only.
_DTYPE_NAMES = {**{short: name for name, short in _DTYPES.items()}, "F8_E8M0": "uint8"}
_NOT_READ = ("F4", "F6_E2M3", "F6_E3M2", "U16", "U32", "U64", "C64")
"""Other dtypes of the library, which are not supported (`Dtype`, safetensors/src/tensor.rs, 0.8)."""


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


def lay_out_checked_file(name: str, arrays: Sequence[Declared]) -> tuple[OutputFile, list[int], list[int]]:
    """Plan a file with checksums; return it, and the first byte of each array and of its CRC-32 text."""
    file, starts = lay_out_file(name, arrays, {_CHECKSUMS: "0" * _DIGITS * len(arrays)})
    first = file.literals[0][1].index(f'"{_CHECKSUMS}": "'.encode()) + len(f'"{_CHECKSUMS}": "')
    order = {key: number for number, key in enumerate(sorted(array.key for array in arrays))}
    return file, starts, [first + _DIGITS * order[array.key] for array in arrays]


def lay_out_file(
    name: str, arrays: Sequence[Declared], about: Mapping[str, str] | None = None
) -> tuple[OutputFile, list[int]]:
    """Plan a file, and return it with the first byte of each array; `about` goes into its `__metadata__`."""
    header: dict[str, Any] = {METADATA: {"format": "pt", "writer": WRITER, **(about or {})}}
    starts = []
    at = 0
    for array in arrays:
        end = at + array.nbytes
        header[array.key] = {
            "dtype": _DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, end],
        }
        starts.append(at)
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the library aligns the elements to 8 bytes
    begin = 8 + len(text)
    file = OutputFile(name, begin + at, ((0, len(text).to_bytes(8, "little") + text),))
    return file, [begin + start for start in starts]


def list_arrays(reader: FolderReader, file: str) -> list[tuple[str, tuple[int, ...], RawArray]]:
    """Return the key, the shape and the location of every array of a file.

    Arrays are adjacent, in any order, and fill the file, as the library requires (`validate` and `read_metadata`,
    safetensors/src/tensor.rs, 0.3 to 0.8).

    Raises:
        UnreadableCheckpointError: the file is not a safetensors file, is truncated, or its arrays do not fill it.
        UnsupportedCheckpointError: an array has an unsupported dtype.
    """
    size = reader.size(file)
    header, begin = _header(reader, file)
    arrays: list[tuple[str, tuple[int, ...], RawArray]] = []
    try:
        for key, entry in header.items():
            if key == METADATA:
                continue
            shape = tuple(entry["shape"])
            numel = checked_numel(shape)
            low, high = (begin + whole_number(place, "data_offsets") for place in entry["data_offsets"])
            if entry["dtype"] in _NOT_READ:
                raise UnsupportedCheckpointError(
                    "a tensor has a dtype that is not supported",
                    found=f"{format_value(key)}: {entry['dtype']}",
                    expected=", ".join(_DTYPE_NAMES),
                    where=str(reader.folder / file),
                )
            dtype = _DTYPE_NAMES[entry["dtype"]]
            if not begin <= low <= high <= size or high - low != numel * ITEM_SIZE[dtype]:
                raise ValueError(
                    f"{format_value(key)} would lie at {format_value(low)}:{format_value(high)} of {size} bytes"
                )
            arrays.append((key, shape, RawArray(file, low, high - low, dtype, numel)))
        _check_filled([extent for *_, extent in arrays], begin, size)
        return _with_checksums(arrays, header.get(METADATA))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damage(reader, file, error) from error


def _with_checksums(
    arrays: list[tuple[str, tuple[int, ...], RawArray]], about: object
) -> list[tuple[str, tuple[int, ...], RawArray]]:
    """Return the arrays with their CRC-32 checksums, if the header has as many checksums as arrays.

    A program that removes tensors may keep the checksums, because it does not know their key; they are then ignored.

    Raises:
        ValueError: the checksums are not hexadecimal numbers.
    """
    text = about.get(_CHECKSUMS) if isinstance(about, dict) else None
    if not isinstance(text, str) or len(text) != _DIGITS * len(arrays):
        return arrays
    if not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"{_CHECKSUMS} is not a list of hexadecimal numbers")
    order = {key: number * _DIGITS for number, key in enumerate(sorted(key for key, *_ in arrays))}
    return [
        (key, shape, extent._replace(crc=int(text[order[key] : order[key] + _DIGITS], 16)))
        for key, shape, extent in arrays
    ]


def read_header(reader: FolderReader, file: str) -> dict[str, Any]:
    """Return the header of a file.

    Raises:
        UnreadableCheckpointError: the file is not a safetensors file.
    """
    return _header(reader, file)[0]


def planned_header(file: OutputFile) -> dict[str, Any]:
    """Return the header of a planned file."""
    text = file.literals[0][1]
    return dict(parse_json(text[8:]))


def declared_arrays(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a header that describe arrays, without the entry that describes the file."""
    return {key: entry for key, entry in header.items() if key != METADATA}


def _check_filled(arrays: Sequence[RawArray], begin: int, size: int) -> None:
    at = begin
    for start, end in sorted((array.offset, array.offset + array.length) for array in arrays):
        if start != at:
            raise ValueError(f"an array begins at byte {start}, where the one before it ends at {at}")
        at = end
    if at != size:
        raise ValueError(f"the arrays end at byte {at} of {size}")


def writer_of(reader: FolderReader, file: str) -> str | None:
    """Return the writer of a file as its header names it; None if it names none.

    Raises:
        UnreadableCheckpointError: the file is not a safetensors file.
    """
    try:
        writer = read_header(reader, file).get(METADATA, {}).get("writer")
    except AttributeError as error:
        raise _damage(reader, file, error) from error
    return writer if isinstance(writer, str) else None


def _header(reader: FolderReader, file: str) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset of the elements in bytes."""
    size = reader.size(file)
    length = int.from_bytes(reader.read(file, 0, 8), "little") if size >= 8 else size
    if length > min(_HEADER_LIMIT, size - 8):
        raise UnreadableCheckpointError(
            "the header is longer than the file", found=length, expected=size, where=str(reader.folder / file)
        )
    try:
        header = parse_json(reader.read(file, 8, length))
    except ValueError as error:
        raise _damage(reader, file, error) from error
    if not isinstance(header, dict):
        raise _damage(reader, file, TypeError("the header is not an object"))
    return header, 8 + length


def _damage(reader: FolderReader, file: str, error: Exception) -> UnreadableCheckpointError:
    return UnreadableCheckpointError(
        "a safetensors file is damaged", found=shorten(str(error)), where=str(reader.folder / file)
    )


def check_index(recorded: Mapping[str, str], found: Mapping[str, str], index: Path, hint: str) -> None:
    """Compare the file of each tensor in an index with the files that contain the tensors.

    Raises:
        UnreadableCheckpointError: the index and the files disagree.
    """
    missing = [name for name, file in recorded.items() if found.get(name) != file]
    surplus = [name for name in found if name not in recorded]
    if missing or surplus:
        raise UnreadableCheckpointError(
            "the index and the files disagree about the tensors",
            found=", ".join([*(f"no {name}" for name in missing[:4]), *map(with_indefinite_article, surplus[:4])]),
            where=str(index),
            hint=hint,
        )
