"""The index of a torch distributed checkpoint: `.metadata`, read without torch.distributed and without trust."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import (
    INTERRUPTED,
    CheckpointError,
    UnreadableCheckpointError,
    io_hint,
    shorten,
)
from mcore_ckpt_ext.planning.array_location import ArchivedRecord
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.dcp_metadata import PLANS, DcpIndex, index_of
from mcore_ckpt_ext.storage.gc_pause import collector_paused
from mcore_ckpt_ext.storage.index_entries import METADATA_FILE as METADATA_FILE
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.storage.pickle_stubs import Record
from mcore_ckpt_ext.storage.plain_pickle import without_last
from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from mcore_ckpt_ext.storage.tensor_reference import TensorReference

RECORDS_SUFFIX = ".distcp"
# A chunk takes some 300 bytes, and the largest checkpoints have millions of them.
INDEX_BYTES = 8 << 30
_PARTS = ("state_dict_metadata", "storage_data", "planner_data", "storage_meta", "mcore_data")
"""Attributes of torch's `Metadata`, and of Megatron's."""


def extent_of(tensor: TensorReference, place: StoredObject) -> ArchivedRecord:
    """The storage of a tensor pickled in the archive at `place`; the tensor begins at its element `tensor.offset`."""
    dtype = str(tensor.storage.dtype).removeprefix("torch.")
    return ArchivedRecord(place.file, place.offset, place.length, dtype, tensor.storage.numel, tensor.storage.key)


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
    """True inside `objects_alone()`."""
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
            return index_of(_metadata(data, str(path)))
        del data  # before objects are made of it: the file and they are most of the memory of an `inspect`
        metadata = _without_plans(short, str(path))
        return index_of(_metadata(_file(folder), str(path)) if metadata is None else metadata)


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
        return index_of(_metadata(data, str(path)) if metadata is None else metadata)


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    """Report what cannot be made an index of as damage; the collector pauses, for there are millions of objects."""
    try:
        with collector_paused():
            yield
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:  # the last of an infinite float
        raise UnreadableCheckpointError(
            "the checkpoint's index is damaged", found=shorten(f"{type(error).__name__}: {error}"), where=str(path)
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
