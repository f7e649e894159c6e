"""Within one load, one rank reads the index of a checkpoint and sends it to all others.

Megatron and this package read `.metadata` several times on every rank, and its size grows with the job: with thousands
of ranks, the file system would deliver terabytes before the first tensor is read.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.patching.overrides import overridden
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.dcp_index import INDEX_BYTES, METADATA_FILE, FolderIndex, SharedIndex
from mcore_ckpt_ext.storage.dcp_metadata import PLANS, DcpIndex

_COMMON = "load_common_state_dict"


@contextmanager
def share_index(stored: FolderIndex) -> Iterator[None]:
    """Let torch and Megatron use the index that rank 0 has read for this rank, within this scope.

    Args:
        stored: the index of the checkpoint to load; without an effect if every rank reads its own.
    """
    with nullcontext() if stored.shared is None else read_index_once(stored):
        yield


def index_for_this_rank(handed: SharedIndex | None) -> SharedIndex | None:
    """Return the index of rank 0 if it belongs to this rank's folder, too; else None.

    If this rank's folder is another copy, for example on a local disk, the size of its index may differ.
    """
    return None if handed is None or _size(handed.folder) != handed.size else handed


def read_shared_index(folder: Path, arguments: Any) -> SharedIndex | None:
    """Return the index of an iteration folder for all ranks, mostly without plans; None without one.

    Plans are only needed by jobs that reuse the plan of the previous save (`--ckpt-assume-constant-structure`,
    `TorchDistSaveShardedStrategy.async_save`, strategies/torch.py, core_v0.12.0 to 0.19.2).
    """
    with suppress(CheckpointError, OSError):
        index = SharedIndex(folder, read_file(folder, METADATA_FILE, INDEX_BYTES))
        return index if getattr(arguments, "ckpt_assume_constant_structure", False) else index.without_plans()
    return None


def _size(folder: Path) -> int:
    with suppress(OSError):
        return (folder / METADATA_FILE).stat().st_size
    return -1


class TorchIndex:
    """The index that torch's `FileSystemReader` returns within a scope, unpickled at most once.

    For small objects torch unpickles nothing if rank 0's index is shared. Megatron requests the index four times in
    a load: twice for the common state, an object in the folder since core_v0.19.0 (`load_common_state_dict`,
    dist_checkpointing/serialization.py), for tensors, and for other objects (`FileSystemReader.read_metadata`,
    torch/distributed/checkpoint/filesystem.py, 2.4 to 2.15). Its own `CachedMetadataFileSystemReader` (core_v0.14.0 to
    0.16.1, later only with `--ckpt-assume-constant-structure`) keeps the index for a later save, so it gets all of it.
    """

    def __init__(self, reader_class: Any, stored: FolderIndex | None) -> None:
        self._reader_class = reader_class
        self._original = reader_class.read_metadata
        self._stored = stored
        self._reads_objects = False
        self._known: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}

    @contextmanager
    def objects_only(self) -> Iterator[None]:
        """Declare that only pickled objects are read within this scope.

        Then a shared index need not be unpickled for torch, which in very large jobs takes longer than all other
        planning of a rank (benchmarks/planning.py).
        """
        before = self._reads_objects
        self._reads_objects = True
        try:
            yield
        finally:
            self._reads_objects = before

    def read_metadata(self, reader: Any, *positional: Any, **keywords: Any) -> Any:
        """Return the index of a reader's folder."""
        if positional or keywords:
            return self._original(reader, *positional, **keywords)
        folder = str(reader.path)
        shared = self._shared_index_of(Path(folder))
        if shared is not None and self._reads_objects and type(reader) is self._reader_class:
            with suppress(CheckpointError):  # torch meets the error again and reports it
                if folder not in self._objects:
                    self._objects[folder] = _object_metadata(shared.index)
                return self._objects[folder]
        if folder not in self._known:
            self._known[folder] = _unpickle(self._original, reader, shared)
        return self._known[folder]

    def _shared_index_of(self, folder: Path) -> SharedIndex | None:
        return self._stored.shared if self._stored is not None and self._stored.is_of(folder) else None


@contextmanager
def read_index_once(stored: FolderIndex | None = None) -> Iterator[TorchIndex]:
    """Let torch unpickle the index of a folder only once within this scope.

    Args:
        stored: the index of the checkpoint to load, which rank 0 may have read for this rank.
    """
    reader: Any = import_module("torch.distributed.checkpoint").FileSystemReader
    original = reader.read_metadata
    index = TorchIndex(reader, stored)

    @functools.wraps(original)
    def read_metadata(self: Any, *positional: Any, **keywords: Any) -> Any:
        return index.read_metadata(self, *positional, **keywords)

    reader.read_metadata = read_metadata
    try:
        with _common_state_by_objects(index):
            yield index
    finally:
        reader.read_metadata = original


@contextmanager
def _common_state_by_objects(index: TorchIndex) -> Iterator[None]:
    """Read the common state as an object within this scope, if Megatron stores it as one."""
    names = ("megatron.core.dist_checkpointing", "megatron.core.dist_checkpointing.serialization")
    with ExitStack() as scope:
        for module in (sys.modules[name] for name in names if name in sys.modules):
            if (load := vars(module).get(_COMMON)) is not None:
                scope.enter_context(overridden(vars(module), **{_COMMON: _as_objects(index, load)}))
        yield


def _as_objects(index: TorchIndex, load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_common_state_dict(*positional: Any, **keywords: Any) -> Any:
        with index.objects_only():
            return load(*positional, **keywords)

    return load_common_state_dict


def _object_metadata(index: DcpIndex) -> Metadata:
    """Return the metadata that torch would read from an index without tensors."""
    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in index.objects}
    return Metadata(entries, None, {MetadataIndex(key): _StorageInfo(*place) for key, place in index.objects.items()})


def _unpickle(read_metadata: Callable[[Any], Any], reader: Any, handed: SharedIndex | None) -> Any:
    """Return torch's metadata of the index; its bytes are not read again if the index is shared."""
    files = getattr(reader, "fs", None)
    if handed is not None and files is not None:
        reader.fs = _WithIndex(files, handed.data)
    try:
        metadata = read_metadata(reader)
    finally:
        if files is not None:
            reader.fs = files
    if getattr(metadata, PLANS, None) is True:  # the placeholder for the plans
        delattr(metadata, PLANS)
    return metadata


class _WithIndex:
    """Torch's file system with the index's bytes in memory."""

    def __init__(self, files: Any, data: bytes) -> None:
        self._files = files
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def create_stream(self, path: Any, mode: str) -> Any:
        """Open a file as torch does."""
        if Path(path).name == METADATA_FILE and mode == "rb":
            return io.BytesIO(self._data)
        return self._files.create_stream(path, mode)
