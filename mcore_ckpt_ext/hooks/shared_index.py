"""The index of a checkpoint is read by one rank and handed to all, within one load.

Megatron and this package look into `.metadata` several times on every rank, and it grows with the job: on thousands of
ranks, a file system is asked for terabytes before the first tensor is read.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.hooks.lent_metadata import LentMetadata
from mcore_ckpt_ext.layout.parallel import placement_changes
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.dcp_index import INDEX_BYTES, METADATA_FILE, PLANS, Lent, lent, lent_of
from mcore_ckpt_ext.storage.runs import iteration_folder, iteration_name


@contextmanager
def index_shared(handed: Lent | None) -> Iterator[None]:
    """Within this scope no rank but the first reads the index of the checkpoint that is to be loaded.

    Args:
        handed: the first rank's, from `index_of`; None where every rank reads its own.
    """
    # A rank whose folder is another one, a copy on its own machine, say, sees so by the size.
    mine = None if handed is None or _size(handed.folder) != handed.size else handed
    with lent(mine), index_read_once() if mine is not None else nullcontext():
        yield


def index_of(directory: Any, step: int | None, arguments: Any) -> Lent | None:
    """The index of the iteration that a load would take, without what a load does not look at; None without one.

    The ranks' plans concern those who save as they have saved before (`--ckpt-assume-constant-structure`,
    `TorchDistSaveShardedStrategy.async_save`, strategies/torch.py, core_v0.12.0 to 0.19.2).
    """
    with suppress(CheckpointError, OSError):
        run = Path(str(directory))
        folder = run / iteration_name(step) if step else iteration_folder(run)
        found = Lent(folder, read_file(folder, METADATA_FILE, INDEX_BYTES))
        return found if getattr(arguments, "ckpt_assume_constant_structure", False) else found.without_plans()
    return None


def is_moved(index: Lent, arguments: Any) -> bool:
    """Whether the parallel layout is another one than that of the checkpoint, so that it is not Megatron's to load."""
    with suppress(CheckpointError, OSError), lent(index):
        return bool(placement_changes(open_checkpoint(index.folder).arguments, JobArguments.of(vars(arguments))))
    return False


def _size(folder: Path) -> int:
    with suppress(OSError):
        return (folder / METADATA_FILE).stat().st_size
    return -1


@contextmanager
def index_read_once() -> Iterator[None]:
    """Within this scope torch unpickles the index of a folder once, and where it is lent, only for tensors.

    Megatron asks for it four times in a load: twice for the common state, for tensors, and for objects
    (`FileSystemReader.read_metadata`, torch/distributed/checkpoint/filesystem.py, 2.2 to 2.13). Its own
    `CachedMetadataFileSystemReader`, where it is used, does the same; it keeps what it got for a later save.
    """
    reader: Any = import_module("torch.distributed.checkpoint").FileSystemReader
    original = reader.read_metadata
    known: dict[str, Any] = {}

    @functools.wraps(original)
    def read_metadata(self: Any, *positional: Any, **keywords: Any) -> Any:
        if positional or keywords:
            return original(self, *positional, **keywords)
        folder = str(self.path)
        handed = lent_of(Path(folder))

        def unpickled() -> Any:
            if folder not in known:
                known[folder] = _unpickled(original, self, handed)
            return known[folder]

        if handed is not None and folder not in known and type(self) is reader:
            with suppress(CheckpointError):  # whatever is wrong with it, torch shall meet
                return LentMetadata(handed.index, unpickled)
        return unpickled()

    reader.read_metadata = read_metadata
    try:
        yield
    finally:
        reader.read_metadata = original


def _unpickled(read_metadata: Callable[[Any], Any], reader: Any, handed: Lent | None) -> Any:
    """What torch makes of the index, whose bytes are at hand where it is lent."""
    files = getattr(reader, "fs", None)
    if handed is not None and files is not None:
        reader.fs = _WithIndex(files, handed.data)
    try:
        found = read_metadata(reader)
    finally:
        if files is not None:
            reader.fs = files
    if getattr(found, PLANS, None) is True:  # what stands for them
        delattr(found, PLANS)
    return found


class _WithIndex:
    """Torch's file system, but for the index, whose bytes are at hand."""

    def __init__(self, files: Any, data: bytes) -> None:
        self._files, self._data = files, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def create_stream(self, path: Any, mode: str) -> Any:
        """Open a file as torch does."""
        if Path(path).name == METADATA_FILE and mode == "rb":
            return io.BytesIO(self._data)
        return self._files.create_stream(path, mode)
