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
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import placement_changes
from mcore_ckpt_ext.patching.overrides import overridden
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folder, iteration_name
from mcore_ckpt_ext.storage.dcp_index import (
    INDEX_BYTES,
    METADATA_FILE,
    SharedIndex,
    objects_only,
    reads_objects_only,
    shared_index_of,
    using_index,
)  # fmt: skip
from mcore_ckpt_ext.storage.dcp_metadata import PLANS, DcpIndex

_COMMON = "load_common_state_dict"


@contextmanager
def index_shared(handed: SharedIndex | None) -> Iterator[None]:
    """Let only rank 0 read the index of the checkpoint to load, within this scope.

    Args:
        handed: rank 0's index, by `index_of`; None if every rank reads its own.
    """
    # If this rank's folder is another copy, for example on a local disk, the size of its index may differ.
    mine = None if handed is None or _size(handed.folder) != handed.size else handed
    with using_index(mine), index_read_once() if mine is not None else nullcontext():
        yield


def index_of(directory: Any, step: int | None, arguments: Any) -> SharedIndex | None:
    """Return the index of the iteration that a load would take, mostly without plans; None without one.

    Plans are only needed by jobs that reuse the plan of the previous save (`--ckpt-assume-constant-structure`,
    `TorchDistSaveShardedStrategy.async_save`, strategies/torch.py, core_v0.12.0 to 0.19.2).
    """
    with suppress(CheckpointError, OSError):
        run = Path(str(directory))
        folder = run / iteration_name(step) if step else iteration_folder(run)
        found = SharedIndex(folder, read_file(folder, METADATA_FILE, INDEX_BYTES))
        return found if getattr(arguments, "ckpt_assume_constant_structure", False) else found.without_plans()
    return None


def is_moved(index: SharedIndex, arguments: Any) -> bool:
    """Return True if the layout differs from the checkpoint's, so that this package reads tensors."""
    with suppress(CheckpointError, OSError), using_index(index):
        return bool(placement_changes(open_checkpoint(index.folder).arguments, JobArguments.of(vars(arguments))))
    return False


def _size(folder: Path) -> int:
    with suppress(OSError):
        return (folder / METADATA_FILE).stat().st_size
    return -1


@contextmanager
def index_read_once() -> Iterator[None]:
    """Let torch unpickle the index of a folder only once within this scope.

    For the common state torch unpickles nothing if rank 0's index is shared. Megatron requests the index four times in
    a load: twice for the common state, an object in the folder since core_v0.19.0 (`load_common_state_dict`,
    dist_checkpointing/serialization.py), for tensors, and for other objects (`FileSystemReader.read_metadata`,
    torch/distributed/checkpoint/filesystem.py, 2.4 to 2.15). Its own `CachedMetadataFileSystemReader` (core_v0.14.0 to
    0.16.1, later only with `--ckpt-assume-constant-structure`) keeps the index for a later save, so it gets all of it.
    """
    reader: Any = import_module("torch.distributed.checkpoint").FileSystemReader
    original = reader.read_metadata
    known: dict[str, Any] = {}
    objects: dict[str, Any] = {}

    @functools.wraps(original)
    def read_metadata(self: Any, *positional: Any, **keywords: Any) -> Any:
        if positional or keywords:
            return original(self, *positional, **keywords)
        folder = str(self.path)
        handed = shared_index_of(Path(folder))
        if handed is not None and reads_objects_only() and type(self) is reader:
            with suppress(CheckpointError):  # torch meets the error again and reports it
                if folder not in objects:
                    objects[folder] = _of_objects(handed.index)
                return objects[folder]
        if folder not in known:
            known[folder] = _unpickled(original, self, handed)
        return known[folder]

    reader.read_metadata = read_metadata
    try:
        with _common_state_by_objects():
            yield
    finally:
        reader.read_metadata = original


@contextmanager
def _common_state_by_objects() -> Iterator[None]:
    """Read the common state as an object within this scope, if Megatron stores it as one."""
    names = ("megatron.core.dist_checkpointing", "megatron.core.dist_checkpointing.serialization")
    with ExitStack() as scope:
        for module in (sys.modules[name] for name in names if name in sys.modules):
            if (load := vars(module).get(_COMMON)) is not None:
                scope.enter_context(overridden(vars(module), **{_COMMON: objects_only()(load)}))
        yield


def _of_objects(index: DcpIndex) -> Metadata:
    """Return the metadata that torch would read from an index without tensors."""
    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in index.objects}
    return Metadata(entries, None, {MetadataIndex(key): _StorageInfo(*place) for key, place in index.objects.items()})


def _unpickled(read_metadata: Callable[[Any], Any], reader: Any, handed: SharedIndex | None) -> Any:
    """Return torch's metadata of the index; its bytes are not read again if the index is shared."""
    files = getattr(reader, "fs", None)
    if handed is not None and files is not None:
        reader.fs = _WithIndex(files, handed.data)
    try:
        found = read_metadata(reader)
    finally:
        if files is not None:
            reader.fs = files
    if getattr(found, PLANS, None) is True:  # the placeholder for the plans
        delattr(found, PLANS)
    return found


class _WithIndex:
    """Torch's file system with the index's bytes in memory."""

    def __init__(self, files: Any, data: bytes) -> None:
        self._files, self._data = files, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def create_stream(self, path: Any, mode: str) -> Any:
        """Open a file as torch does."""
        if Path(path).name == METADATA_FILE and mode == "rb":
            return io.BytesIO(self._data)
        return self._files.create_stream(path, mode)
