"""Builds an index from an unpickled `Metadata` of torch, whose content is untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import gt, sub
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, format_value
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.budget import MOST_AXES, MOST_ELEMENTS, check_keys, elements_of, whole_number
from mcore_ckpt_ext.storage.index_entries import ChunkTable, StoredArray, StoredObject

PLANS = "all_local_plans"
"""The attribute with the ranks' plans.

Megatron adds it last (strategies/state_dict_saver.py, 0.11.0 to 0.19.2).
"""


@dataclass(frozen=True)
class DcpIndex:
    """The contents of `.metadata`: arrays by key, and objects by key (with Megatron's `/shard_…` suffix).

    Attributes:
        arrays: the arrays by key.
        objects: the objects by key.
        natural_shapes: original shapes of arrays that Megatron 0.8 to 0.15 stored reshaped (`mcore_data`,
            dist_checkpointing/strategies/torch.py and resharding.py).
        has_plans: the index contains the ranks' plans, as Megatron's have since 0.11 (`all_local_plans`).
        may_lack_attributes: torch may have written the index without Megatron's attributes, the plans and the natural
            shapes. torch 2.9 to 2.11 write a copy, which has only the fields of its class
            (`_FileSystemWriter.finish`, torch/distributed/checkpoint/filesystem.py). Since 2.9 an index has a version.
        chunks_show_parameters: the chunks of a flat gradient buffer begin and end at parameter boundaries. This holds
            in torch's format, which has a chunk for each saved piece.
        overlapping: keys of arrays with more stored elements than their shape has, so that chunks overlap. torch
            refuses to write such arrays (`_validate_global_plan`, torch/distributed/checkpoint/default_planner.py).
    """

    arrays: Mapping[str, StoredArray]
    objects: Mapping[str, StoredObject]
    natural_shapes: Mapping[str, tuple[int, ...]]
    has_plans: bool = False
    may_lack_attributes: bool = False
    chunks_show_parameters: bool = True
    overlapping: frozenset[str] = frozenset()


def index_of(metadata: Any) -> DcpIndex:
    """Check every field of torch's `Metadata`, and return the index that it describes.

    Raises:
        UnsupportedCheckpointError: the records are compressed.
        AttributeError, TypeError, ValueError, KeyError, OverflowError: the metadata is damaged.
    """
    # Chunks are indexed by (key, offsets), objects by (key, None): `MetadataIndex` of
    # torch/distributed/checkpoint/metadata.py.
    keys: list[tuple[str, tuple[int, ...] | None]] = []
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedCheckpointError(
                "the checkpoint's records are compressed", found=info.transform_descriptors, where=index.fqn
            )
        offset = getattr(index, "offset", None)  # absent for objects: a default of torch's class
        if type(offset) is not tuple or len(offset) > MOST_AXES:
            offset = None if offset is None else _axes(offset)
        if type(index.fqn) is not str or offset and max(offset) >= MOST_ELEMENTS:
            raise ValueError(f"a record of {format_value(index.fqn)} at {format_value(offset)}")
        keys.append((index.fqn, offset))
    check_keys(keys)
    places = dict(zip(keys, metadata.storage_data.values(), strict=True))
    arrays: dict[str, StoredArray] = {}
    objects: dict[str, StoredObject] = {}
    overlapping: list[str] = []
    table = ChunkTable()
    left = len(places)
    for key, entry in metadata.state_dict_metadata.items():
        _named(key)
        if hasattr(entry, "chunks"):
            left -= len(entry.chunks)
            if left < 0:
                raise ValueError(f"more chunks than records: the {len(entry.chunks)} of {key} are repeated")
            arrays[key], stored = _array(key, entry, places, table)
            if stored > prod(arrays[key].shape):
                overlapping.append(key)
        else:
            info = places[key, None]
            if type(info.relative_path) is not str:
                raise TypeError(f"the name of a file is {format_value(info.relative_path)}")
            offset = whole_number(info.offset, "an offset")
            length = whole_number(info.length, "a length")
            objects[key] = StoredObject(info.relative_path, offset, length)
    natural = {
        _named(key): _shape(data["nd_reformulated_orig_global_shape"])
        for key, data in (getattr(metadata, "mcore_data", None) or {}).items()
        if data.get("nd_reformulated_orig_global_shape") is not None
    }
    has_plans = bool(getattr(metadata, PLANS, None))
    # Of Megatron's own class of 0.15, `MCoreMetadata`, the shapes are a field, which is copied as well.
    is_whole = has_plans or (hasattr(metadata, "mcore_data") and type(metadata).__name__ == "Metadata")
    may_lack = getattr(metadata, "version", None) is not None and not is_whole
    return DcpIndex(arrays, objects, natural, has_plans, may_lack, overlapping=frozenset(overlapping))


def _named(key: Any) -> str:
    if type(key) is not str:
        raise TypeError(f"the name of an array is {format_value(key)}")
    return key


def _axes(numbers: Any) -> tuple[int, ...]:
    """Return sizes or offsets by axis; their number is limited, as a million entries may share a tuple."""
    if type(numbers) not in (tuple, list) or len(numbers) > MOST_AXES:
        raise ValueError(f"sizes of an array that are {format_value(numbers)}")
    return tuple(numbers)


def _shape(numbers: Any) -> tuple[int, ...]:
    """Return a shape after checking that an array can have it."""
    shape = _axes(numbers)
    elements_of(shape)
    return shape


def _array(
    key: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...] | None], Any], table: ChunkTable
) -> tuple[StoredArray, int]:
    """Return an array, and the number of elements of its chunks."""
    shape = _shape(entry.size)
    axes = len(shape)
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZE:
        raise ValueError(f"{key} has the unknown dtype {dtype}")
    begin = table.end
    item_size = ITEM_SIZE[dtype]
    stored = 0
    for chunk in entry.chunks:
        offsets = chunk.offsets
        sizes = chunk.sizes
        if not type(offsets) is type(sizes) is tuple:
            offsets = _axes(offsets)
            sizes = _axes(sizes)
        if not len(offsets) == len(sizes) == axes:
            raise ValueError(f"a chunk of {key} has {len(offsets)} axes, its array {len(shape)}")
        if not _fits(offsets, sizes, shape):
            place = f"at {format_value(offsets)} with sizes {format_value(sizes)}"
            raise ValueError(f"a chunk of {key} lies {place}, in an array of shape {format_value(shape)}")
        info = places[key, offsets]
        numel = sizes[0] if axes == 1 else prod(sizes)
        file = info.relative_path
        length = whole_number(info.length, "a length")
        if type(file) is not str:
            raise TypeError(f"the name of a file is {format_value(file)}")
        if numel * item_size > length:
            raise ValueError(f"a chunk of {key} has {numel} elements of {dtype} in {length} bytes")
        stored += numel
        try:
            table.append(file, info.offset, length, offsets, sizes)
        except (TypeError, OverflowError) as error:
            raise ValueError(
                f"a chunk of {key} at {format_value(offsets)} with sizes {format_value(sizes)}: {error}"
            ) from error
    return StoredArray(key, shape, dtype, table.chunks(begin, axes, dtype)), stored


def _fits(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a chunk lies within its array.

    Sizes are compared first, so that no large number is computed.
    """
    if len(shape) == 1:  # as most of them are
        return 0 <= sizes[0] <= shape[0] and 0 <= offsets[0] <= shape[0] - sizes[0]
    return not shape or (
        min(sizes) >= 0
        and min(offsets) >= 0
        and not any(map(gt, sizes, shape))
        and not any(map(gt, offsets, map(sub, shape, sizes)))
    )
