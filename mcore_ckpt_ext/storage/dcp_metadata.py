"""Builds an index from an unpickled `Metadata` of torch, whose content is untrusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from math import prod
from operator import add, attrgetter
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, format_value, quantity
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.budget import MOST_AXES, MOST_ELEMENTS, check_keys, checked_numel, whole_number
from mcore_ckpt_ext.storage.index_entries import ChunkTable, StoredArray, StoredObject

# torch's `_StorageInfo` by key and offsets of a chunk; None in place of the offsets for an object.
Records = Mapping[tuple[str, "tuple[int, ...] | None"], Any]
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
    records = _records(metadata.storage_data)
    arrays: dict[str, StoredArray] = {}
    objects: dict[str, StoredObject] = {}
    overlapping: list[str] = []
    table = ChunkTable()
    unused = len(records)
    for key, entry in metadata.state_dict_metadata.items():
        _check_name(key)
        if hasattr(entry, "chunks"):
            unused -= len(entry.chunks)
            if unused < 0:
                raise ValueError(f"more chunks than records: the {len(entry.chunks)} of {key} are repeated")
            array = arrays[key] = _array(key, entry, records, table)
            if sum(array.numels()) > prod(array.shape):
                overlapping.append(key)
        else:
            record = records[key, None]
            if type(record.relative_path) is not str:
                raise TypeError(f"the name of a file is {format_value(record.relative_path)}")
            offset = whole_number(record.offset, "an offset")
            length = whole_number(record.length, "a length")
            objects[key] = StoredObject(record.relative_path, offset, length)
    natural = {
        _check_name(key): _shape(data["nd_reformulated_orig_global_shape"])
        for key, data in (getattr(metadata, "mcore_data", None) or {}).items()
        if data.get("nd_reformulated_orig_global_shape") is not None
    }
    has_plans = bool(getattr(metadata, PLANS, None))
    # Of Megatron's own class of 0.15, `MCoreMetadata`, the shapes are a field, which is copied as well.
    is_whole = has_plans or (hasattr(metadata, "mcore_data") and type(metadata).__name__ == "Metadata")
    may_lack = getattr(metadata, "version", None) is not None and not is_whole
    return DcpIndex(arrays, objects, natural, has_plans, may_lack, overlapping=frozenset(overlapping))


def _check_name(key: Any) -> str:
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
    checked_numel(shape)
    return shape


def _records(storage_data: Mapping[Any, Any]) -> Records:
    """Return the records by key and offsets, none of them compressed.

    Chunks are indexed by (key, offsets), objects by (key, None): `MetadataIndex` of
    torch/distributed/checkpoint/metadata.py.
    """
    names = list(map(attrgetter("fqn"), storage_data))
    offsets = list(map(attrgetter("offset"), storage_data))
    if not {tuple, type(None)}.issuperset(map(type, offsets)):
        offsets = [None if offset is None else _axes(offset) for offset in offsets]
    of_chunks = list(filter(None, offsets))
    are_short = max(map(len, of_chunks), default=0) <= MOST_AXES
    if not (are_short and _are_below(MOST_ELEMENTS, chain.from_iterable(of_chunks)) and _are_texts(names)):
        for name, offset in zip(names, offsets, strict=True):
            numbers = () if offset is None else _axes(offset)
            if type(name) is not str or not _are_below(MOST_ELEMENTS, numbers):
                raise ValueError(f"a record of {format_value(name)} at {format_value(offset)}")
    keys = list(zip(names, offsets, strict=True))
    check_keys(keys)
    records = dict(zip(keys, storage_data.values(), strict=True))
    for (name, _), record in records.items():
        if record.transform_descriptors:
            raise UnsupportedCheckpointError(
                "the checkpoint's records are compressed", found=record.transform_descriptors, where=name
            )
    return records


def _are_texts(values: Iterable[Any]) -> bool:
    return {str}.issuperset(map(type, values))


def _are_below(limit: int, values: Iterable[Any]) -> bool:
    """Return whether all values are integers below a limit."""
    numbers = list(values)
    return {int}.issuperset(map(type, numbers)) and max(numbers, default=0) < limit


def _array(key: str, entry: Any, all_records: Records, table: ChunkTable) -> StoredArray:
    """Return an array after checking its chunks, column by column."""
    shape = _shape(entry.size)
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZE:
        raise ValueError(f"{key} has the unknown dtype {dtype}")
    offsets, sizes = (_bounds(key, entry.chunks, name, len(shape)) for name in ("offsets", "sizes"))
    records = list(map(all_records.__getitem__, zip(repeat(key), offsets)))
    files = list(map(attrgetter("relative_path"), records))
    if not _are_texts(files):
        raise TypeError(f"the names of the files of {key} are not all text")
    lengths = [whole_number(record.length, "a length") for record in records]
    begins = map(attrgetter("offset"), records)
    try:
        chunks = table.extend(dtype, len(shape), files, begins, lengths, offsets, sizes)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"the chunks of {key}: {error}") from error
    array = StoredArray(key, shape, dtype, chunks)
    for axis, end in enumerate(shape):
        begins_on_axis, sizes_on_axis = array.bounds_on(axis)
        stops = map(add, begins_on_axis, sizes_on_axis)
        if chunks and (min(begins_on_axis) < 0 or min(sizes_on_axis) < 0 or max(stops) > end):
            raise ValueError(f"a chunk of {key} lies outside of the array, which has shape {format_value(shape)}")
    # Only now are the sizes small enough to be multiplied.
    for numel, length in zip(array.numels(), lengths, strict=True):
        if numel * ITEM_SIZE[dtype] > length:
            content = f"{quantity(numel, 'element')} of {dtype} in {quantity(length, 'byte')}"
            raise ValueError(f"a chunk of {key} has {content}")
    return array


def _bounds(key: str, chunks: Iterable[Any], name: str, axes: int) -> list[tuple[int, ...]]:
    """Return the offsets or the sizes of chunks after checking how many they are."""
    bounds = list(map(attrgetter(name), chunks))
    if not {tuple}.issuperset(map(type, bounds)):
        bounds = list(map(_axes, bounds))
    if not {axes}.issuperset(map(len, bounds)):
        raise ValueError(f"a chunk of {key} has not as many axes as its array, {axes}")
    return bounds
