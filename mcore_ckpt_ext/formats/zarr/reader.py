"""Reads the format `zarr`: a folder with a zarr array for each sharded key, and objects as files.

Source: `megatron/core/dist_checkpointing/strategies/zarr.py` (core_v0.7.0 to 0.15.3; removed in 0.16, commit faa6037b).
An array has the global shape in uncompressed chunks of the local shard's shape; `flattened_range` pieces are written by
coordinates, so that optimizer state in model space has its natural shape. Everything else is as in `torch_dist`:
`megatron.training` could save it up to 0.11, with the optimizer in `fully_sharded_bucket_space`,
`fully_sharded_model_space` or `dp_zero_gather_scatter` (`dp_reshardable` needs irregular chunks, which zarr lacks).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import (
    INTERRUPTED,
    UnreadableCheckpointError,
    UnsupportedCheckpointError,
    format_value,
    quantity,
    shorten,
)
from mcore_ckpt_ext.formats.evidence import Bound, Loading
from mcore_ckpt_ext.formats.parts import Files
from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
from mcore_ckpt_ext.formats.view import OpenedFormat
from mcore_ckpt_ext.job.releases import LOADS_ZARR, WRITES_ZARR
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.budget import checked_numel
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.index_entries import StoredArray, StoredChunk, StoredObject
from mcore_ckpt_ext.storage.json_text import parse_json

NAME = "zarr"
_DESCRIPTION = ".zarray"
# Megatron patches the dtype `bfloat16` into the description (`_create_zarr_array`).
_DTYPES: Mapping[str, str] = {
    "bfloat16": "bfloat16",
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
    "|u1": "uint8",
    "|i1": "int8",
    "<i2": "int16",
    "<i4": "int32",
    "<i8": "int64",
    "|b1": "bool",
}
# The settings of every array that Megatron writes.
_PLAIN: Mapping[str, Any] = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C"}


class ZarrCheckpoint(TorchDistCheckpoint):
    """One iteration folder in `zarr`."""

    name = NAME

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        # Megatron's loader supported it up to 0.15 (commit faa6037b).
        return replace(super().format, loading=Loading(in_megatron=True, loaded_by=LOADS_ZARR))

    @override
    def _evidence_of_index(self) -> Iterator[Bound]:
        yield "its arrays are in the format zarr, which megatron.training wrote up to 0.11", *WRITES_ZARR.span

    @cached_property
    @override
    def files(self) -> Files:
        return replace(super().files, raw_arrays=self._raw_arrays)

    def _raw_arrays(self) -> Iterator[RawArray]:
        extents = (chunk.extent for array in self._stored_index.arrays.values() for chunk in array.chunks)
        return (extent for extent in extents if isinstance(extent, RawArray))

    def _read_index(self) -> DcpIndex:
        return self.folder_index.content_by(read_index)

    def _unwrap(self, loaded: Any, where: str) -> Any:
        """Return the object itself; in this format it is not wrapped in a list."""
        return loaded


def read_index(folder: Path) -> DcpIndex:
    """Return the arrays and objects of an iteration folder.

    Raises:
        UnreadableCheckpointError: an array's description is damaged, or chunks are missing.
        UnsupportedCheckpointError: an array has settings that Megatron does not use.
    """
    arrays: dict[str, StoredArray] = {}
    objects: dict[str, StoredObject] = {}
    for path in sorted(folder.iterdir()):
        if (path / _DESCRIPTION).is_file():
            arrays[path.name] = _array(path)
        elif path.is_dir():
            for file in sorted(path.glob("shard_*.pt")):
                place = StoredObject(f"{path.name}/{file.name}", 0, file.stat().st_size)
                objects[f"{path.name}/{file.stem}"] = place
    return DcpIndex(arrays, objects, {}, chunks_show_parameters=False)


def _array(path: Path) -> StoredArray:
    where = path / _DESCRIPTION
    try:
        described = parse_json(read_file(path.parent, f"{path.name}/{_DESCRIPTION}"))
        shape, sizes = (tuple(described[name]) for name in ("shape", "chunks"))
        for axes in (shape, sizes):
            checked_numel(axes)
        separator = str(described.get("dimension_separator", "."))
        dtype = described["dtype"]
        plain = {name: described[name] for name in _PLAIN}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableCheckpointError(
            "the description of an array is damaged",
            found=shorten(f"{type(error).__name__}: {error}"),
            where=str(where),
        ) from error
    if plain != _PLAIN or not isinstance(dtype, str) or dtype not in _DTYPES or not _is_filled(shape, sizes):
        raise UnsupportedCheckpointError(
            "an array is not stored as Megatron stores it: uncompressed, in chunks that fill it",
            found=f"{format_value(dtype)}, shape {shape}, chunks {sizes}, {format_value(plain)}",
            where=str(where),
        )
    return StoredArray(path.name, shape, _DTYPES[dtype], tuple(_chunks(path, shape, sizes, separator, _DTYPES[dtype])))


def _check_size(folder: Path, file: str, expected: int, dtype: str) -> None:
    """Compare the size of a chunk's file with its description: zarr always writes whole chunks."""
    path = folder / file
    size = path.stat().st_size if path.is_file() else None
    if size is not None and size != expected:
        raise UnreadableCheckpointError(
            "a chunk of an array has another size than the array's description says: one of them is damaged",
            found=quantity(size, "byte"),
            expected=f"{quantity(expected, 'byte')}, for {dtype}",
            where=str(path),
            hint="use another iteration, or another copy of this one",
        )


def _is_filled(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return whether the last chunk ends with the array on all axes but the first."""
    if len(shape) != len(sizes) or min(sizes, default=1) < 1 or min(shape, default=0) < 0:
        return False
    return not any(whole % size for whole, size in zip(shape[1:], sizes[1:], strict=True))


def _chunks(
    path: Path, shape: tuple[int, ...], sizes: tuple[int, ...], separator: str, dtype: str
) -> Iterator[StoredChunk]:
    """Yield all chunks; the last one along the first axis may extend beyond the array, and is truncated."""
    counts = [-(-whole // size) for whole, size in zip(shape, sizes, strict=True)]
    stored = sum(not file.name.startswith(".") for file in path.iterdir())
    if stored != prod(counts):
        raise UnreadableCheckpointError(
            "an array of the checkpoint lacks chunks",
            found=f"{stored} of them",
            expected=f"{prod(counts)}, for shape {shape} in chunks {sizes}",
            where=str(path),
            hint=INTERRUPTED,
        )
    length = prod(sizes) * ITEM_SIZE[dtype]
    if not stored:
        return  # one axis has no elements, so the lengths of other axes are not limited by chunks
    for number in product(*(range(count) for count in counts)):
        offsets = tuple(index * size for index, size in zip(number, sizes, strict=True))
        inside = tuple(min(size, whole - start) for size, whole, start in zip(sizes, shape, offsets, strict=True))
        file = f"{path.name}/{separator.join(map(str, number)) or '0'}"
        _check_size(path.parent, file, length, dtype)
        yield StoredChunk(offsets, inside, RawArray(file, 0, length, dtype, prod(inside)))
