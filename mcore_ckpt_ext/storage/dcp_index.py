"""The index of a torch distributed checkpoint: `.metadata`, read without torch.distributed and without trust."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from operator import gt, sub
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import (
    INTERRUPTED,
    CheckpointError,
    UnreadableCheckpointError,
    UnsupportedCheckpointError,
    io_hint,
    shortened,
    shown,
)
from mcore_ckpt_ext.planning.array_location import ArchivedRecord
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.budget import MOST_AXES, MOST_ELEMENTS, check_keys, elements_of, whole_number
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.gc_pause import collector_paused
from mcore_ckpt_ext.storage.index_entries import METADATA_FILE as METADATA_FILE
from mcore_ckpt_ext.storage.index_entries import ChunkTable, StoredArray, StoredObject
from mcore_ckpt_ext.storage.pickle_stubs import Record
from mcore_ckpt_ext.storage.plain_pickle import without_last
from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from mcore_ckpt_ext.storage.tensor_reference import TensorReference

RECORDS_SUFFIX = ".distcp"
# A chunk takes some 300 bytes, and the largest checkpoints have millions of them.
INDEX_BYTES = 8 << 30
_PARTS = ("state_dict_metadata", "storage_data", "planner_data", "storage_meta", "mcore_data")
"""Attributes of torch's `Metadata`, and of Megatron's."""
PLANS = "all_local_plans"
"""The ranks' plans, which Megatron adds when all else is there (strategies/state_dict_saver.py, 0.11.0 to 0.19.2)."""


def extent_of(tensor: TensorReference, place: StoredObject) -> ArchivedRecord:
    """The storage of a tensor pickled in the archive at `place`; the tensor begins at its element `tensor.offset`."""
    dtype = str(tensor.storage.dtype).removeprefix("torch.")
    return ArchivedRecord(place.file, place.offset, place.length, dtype, tensor.storage.numel, tensor.storage.key)


@dataclass(frozen=True)
class DcpIndex:
    """The contents of `.metadata`: arrays by key, and objects by key (with Megatron's `/shard_…` suffix).

    `natural_shapes` gives the shape of arrays that Megatron 0.8 to 0.15 stored reshaped (`mcore_data`,
    dist_checkpointing/strategies/torch.py and resharding.py). `has_plans`: the ranks' plans are kept with it, as
    Megatron has done since 0.11 (`all_local_plans`). `chunks_show_parameters`: the chunks of a flat gradient buffer
    begin and end where its parameters do; so it is in torch's format, with a chunk for each saved piece. `overlapping`:
    the keys of arrays of which more elements are stored than there are, so that it matters which of them are taken;
    torch refuses to write such (`_validate_global_plan`, torch/distributed/checkpoint/default_planner.py).
    """

    arrays: Mapping[str, StoredArray]
    objects: Mapping[str, StoredObject]
    natural_shapes: Mapping[str, tuple[int, ...]]
    has_plans: bool = False
    chunks_show_parameters: bool = True
    overlapping: frozenset[str] = frozenset()


class SharedIndex:
    """The index of an iteration folder that somebody else has read; it is parsed once.

    Attributes:
        folder: the iteration folder.
        data: what is in `.metadata`, or the same without the ranks' plans.
        size: bytes of that file.
        digest: of that file.
    """

    def __init__(
        self,
        folder: Path,
        data: bytes,
        size: int | None = None,
        pickled: bytes | None = None,
        digest: str | None = None,
    ) -> None:
        self.folder, self.data, self.size = folder, data, len(data) if size is None else size
        self.digest = index_digest(data) if digest is None else digest
        self._pickled = pickled  # the index, by the rank that has parsed it

    def __reduce__(self) -> tuple[type[SharedIndex], tuple[Path, bytes, int, bytes | None, str]]:
        """To another rank of the job: what is parsed already need not be parsed there."""
        index = vars(self).get("index")
        pickled = None if index is None else pickle.dumps(index)
        return SharedIndex, (self.folder, self.data, self.size, pickled, self.digest)

    def without_plans(self) -> SharedIndex:
        """The same with True in their place, where they are: more than half of an index, and hardly anybody looks."""
        short = without_last(self.data, PLANS, _PARTS)
        if short is not None:
            found = SharedIndex(self.folder, short, self.size, digest=self.digest)
            with suppress(CheckpointError):  # it only looked as if they came last
                if found.index.has_plans:
                    return found
        return self

    @cached_property
    def index(self) -> DcpIndex:
        """What it says; errors as of `read_index`."""
        if self._pickled is not None:
            with collector_paused():
                found: DcpIndex = pickle.loads(self._pickled)  # a rank of this job made it
            return found
        return _parsed(self.data, self.folder / METADATA_FILE)


_SHARED_INDEX: ContextVar[SharedIndex | None] = ContextVar("mcore_ckpt_ext_lent_index", default=None)


@contextmanager
def using_index(index: SharedIndex | None) -> Iterator[None]:
    """Within this scope, that index is not read from its folder; None lends nothing."""
    token = _SHARED_INDEX.set(index)
    try:
        yield
    finally:
        _SHARED_INDEX.reset(token)


def lent_of(folder: Path) -> SharedIndex | None:
    """What is lent of a folder now."""
    found = _SHARED_INDEX.get()
    return found if found is not None and found.folder.resolve() == folder.resolve() else None


_OBJECTS_ALONE: ContextVar[bool] = ContextVar("mcore_ckpt_ext_objects_alone", default=False)


@contextmanager
def objects_alone() -> Iterator[None]:
    """Within this scope, pickled objects and nothing else are asked for.

    So an index that is lent need not be unpickled for torch, which takes longer than all else that a rank of a very
    large job plans (benchmarks/planning.py).
    """
    token = _OBJECTS_ALONE.set(True)
    try:
        yield
    finally:
        _OBJECTS_ALONE.reset(token)


def asked_for_objects_alone() -> bool:
    """Whether it is so now."""
    return _OBJECTS_ALONE.get()


def read_index(folder: Path) -> DcpIndex:
    """Read `.metadata` of an iteration folder, or take what is lent of it.

    Raises:
        UnreadableCheckpointError: it is missing, damaged, or contradicts itself.
        UnsupportedCheckpointError: the records are compressed.
    """
    if (found := lent_of(folder)) is not None:
        return found.index
    path = folder / METADATA_FILE
    with _damage_reported(path):
        data = _file(folder)
        short = without_last(data, PLANS, _PARTS)
        if short is None:
            return _index(_metadata(data, str(path)))
        del data  # before objects are made of it: the file and they are most of the memory of an `inspect`
        metadata = _without_plans(short, str(path))
        return _index(_metadata(_file(folder), str(path)) if metadata is None else metadata)


def index_digest(data: bytes) -> str:
    """The digest of the content of `.metadata`, which no two saves share.

    Torch gives every save an identifier, and its writers put it there (`StorageMeta.save_id`,
    torch/distributed/checkpoint/filesystem.py, 2.4 to 2.13; `FileSystemWriterAsync.finish`,
    megatron/core/dist_checkpointing/strategies/filesystem_async.py, core_v0.8.0 to 0.19.2).
    """
    return blake2b(data, digest_size=16).hexdigest()


def digest_of_index(folder: Path) -> str | None:
    """The digest of the index of an iteration folder, or of what is lent of it; None where it cannot be read."""
    if (found := lent_of(folder)) is not None:
        return found.digest
    with suppress(OSError):
        return index_digest(read_file(folder, METADATA_FILE, INDEX_BYTES))
    return None


def check_plans(folder: Path) -> None:
    """Unpickle the ranks' plans, too, which nobody here reads, but Megatron's own loader does.

    Raises:
        CheckpointError: they, or the rest, are damaged.
    """
    safe_loads(_file(folder), str(folder / METADATA_FILE))


def _file(folder: Path) -> bytes:
    try:
        return read_file(folder, METADATA_FILE, INDEX_BYTES)
    except OSError as error:
        raise UnreadableCheckpointError(
            "the checkpoint's index cannot be read",
            found=error.strerror,
            where=str(folder / METADATA_FILE),
            hint=io_hint(error),
        ) from error


def _parsed(data: bytes, path: Path) -> DcpIndex:
    with _damage_reported(path):
        metadata = _without_plans(without_last(data, PLANS, _PARTS), str(path))
        return _index(_metadata(data, str(path)) if metadata is None else metadata)


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    """Report what cannot be made an index of as damage; the collector pauses, for there are millions of objects."""
    try:
        with collector_paused():
            yield
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:  # the last of an infinite float
        raise UnreadableCheckpointError(
            "the checkpoint's index is damaged", found=shortened(f"{type(error).__name__}: {error}"), where=str(path)
        ) from error


def _without_plans(short: bytes | None, where: str) -> Any:
    """What an index holds but for the ranks' plans: they are more than half of it, come last, and nobody reads them.

    Returns:
        None where `short`, the index without them, is none, or only looked like one.
    """
    if short is not None:
        with suppress(CheckpointError):  # which shows again where all of it is loaded
            found = safe_loads(short, where)
            if isinstance(found, Record) and getattr(found, PLANS, None) is True and hasattr(found, _PARTS[0]):
                return found
    return None


def _metadata(data: bytes, where: str) -> Any:
    """What an index holds, plans included."""
    if not data:
        raise UnreadableCheckpointError(
            "the checkpoint's index is empty", found="0 bytes", where=where, hint=INTERRUPTED
        )
    return safe_loads(data, where)


def _index(metadata: Any) -> DcpIndex:
    # Chunks are filed under (key, offsets), objects under (key, None): `MetadataIndex` of
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
            raise ValueError(f"a record of {shown(index.fqn)} at {shown(offset)}")
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
                raise TypeError(f"the name of a file is {shown(info.relative_path)}")
            offset, length = whole_number(info.offset, "an offset"), whole_number(info.length, "a length")
            objects[key] = StoredObject(info.relative_path, offset, length)
    natural = {
        _named(key): _shape(data["nd_reformulated_orig_global_shape"])
        for key, data in (getattr(metadata, "mcore_data", None) or {}).items()
        if data.get("nd_reformulated_orig_global_shape") is not None
    }
    has_plans = bool(getattr(metadata, PLANS, None))
    return DcpIndex(arrays, objects, natural, has_plans, overlapping=frozenset(overlapping))


def _named(key: Any) -> str:
    if type(key) is not str:
        raise TypeError(f"the name of an array is {shown(key)}")
    return key


def _axes(numbers: Any) -> tuple[int, ...]:
    """Sizes or offsets by axis; not more of them than axes, for each of a million entries may refer to the same."""
    if type(numbers) not in (tuple, list) or len(numbers) > MOST_AXES:
        raise ValueError(f"sizes of an array that are {shown(numbers)}")
    return tuple(numbers)


def _shape(numbers: Any) -> tuple[int, ...]:
    """A shape that an array can have."""
    shape = _axes(numbers)
    elements_of(shape)
    return shape


def _array(
    key: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...] | None], Any], table: ChunkTable
) -> tuple[StoredArray, int]:
    """Returns: an array, and how many elements its chunks have."""
    shape = _shape(entry.size)
    axes, dtype = len(shape), str(entry.properties.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZE:
        raise ValueError(f"{key} has the unknown dtype {dtype}")
    begin, item_size, stored = table.end, ITEM_SIZE[dtype], 0
    for chunk in entry.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        if not type(offsets) is type(sizes) is tuple:
            offsets, sizes = _axes(offsets), _axes(sizes)
        if not len(offsets) == len(sizes) == axes:
            raise ValueError(f"a chunk of {key} has {len(offsets)} axes, its array {len(shape)}")
        if not _fits(offsets, sizes, shape):
            place = f"at {shown(offsets)} with sizes {shown(sizes)}"
            raise ValueError(f"a chunk of {key} lies {place}, in an array of shape {shown(shape)}")
        info, numel = places[key, offsets], sizes[0] if axes == 1 else prod(sizes)
        file, length = info.relative_path, whole_number(info.length, "a length")
        if type(file) is not str:
            raise TypeError(f"the name of a file is {shown(file)}")
        if numel * item_size > length:
            raise ValueError(f"a chunk of {key} has {numel} elements of {dtype} in {length} bytes")
        stored += numel
        try:
            table.append(StoredObject(file, info.offset, length), offsets, sizes)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a chunk of {key} at {shown(offsets)} with sizes {shown(sizes)}: {error}") from error
    return StoredArray(key, shape, dtype, table.chunks(begin, axes, dtype)), stored


def _fits(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a chunk lies in its array; in this order, no large number is calculated with."""
    if len(shape) == 1:  # as most of them are
        return 0 <= sizes[0] <= shape[0] and 0 <= offsets[0] <= shape[0] - sizes[0]
    return not shape or (
        min(sizes) >= 0 and min(offsets) >= 0 and not any(map(gt, sizes, shape))
        and not any(map(gt, offsets, map(sub, shape, sizes)))
    )  # fmt: skip
