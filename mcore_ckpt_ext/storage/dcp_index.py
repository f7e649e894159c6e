"""Reads `.metadata`, the index of a torch distributed checkpoint, as untrusted data."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import (
    INTERRUPTED,
    ContentError,
    UnreadableCheckpointError,
    shorten,
    unreadable_file,
)
from mcore_ckpt_ext.planning.array_location import ArchivedRecord
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.dcp_metadata import PLANS, DcpIndex, index_of
from mcore_ckpt_ext.storage.gc_pause import collector_paused
from mcore_ckpt_ext.storage.index_entries import METADATA_FILE as METADATA_FILE
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.storage.pickle_stubs import MetadataStub
from mcore_ckpt_ext.storage.plain_pickle import strip_last
from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from mcore_ckpt_ext.storage.tensor_reference import TensorReference

RECORDS_SUFFIX = ".distcp"
# A chunk takes about 300 bytes, and the largest checkpoints have millions of chunks.
INDEX_BYTES = 8 << 30
_PARTS = ("state_dict_metadata", "storage_data", "planner_data", "storage_meta", "mcore_data")
"""Attributes of torch's `Metadata`, and of Megatron's."""


def extent_of(tensor: TensorReference, place: StoredObject) -> ArchivedRecord:
    """Return the storage of a tensor that is pickled in the archive at `place`.

    The tensor begins at element `tensor.offset` of the storage.
    """
    dtype = str(tensor.storage.dtype).removeprefix("torch.")
    return ArchivedRecord(place.file, place.offset, place.length, dtype, tensor.storage.numel, tensor.storage.key)


class SharedIndex:
    """The index of an iteration folder that another rank has read; it is parsed once.

    Attributes:
        folder: the iteration folder.
        data: the content of `.metadata`, possibly without the ranks' plans.
        size: size of the file in bytes.
        digest: digest of the file.
    """

    def __init__(
        self,
        folder: Path,
        data: bytes,
        size: int | None = None,
        pickled: bytes | None = None,
        digest: str | None = None,
    ) -> None:
        self.folder = folder
        self.data = data
        self.size = len(data) if size is None else size
        self.digest = index_digest(data) if digest is None else digest
        self._pickled = pickled  # the parsed index, pickled by another rank

    def __reduce__(self) -> tuple[type[SharedIndex], tuple[Path, bytes, int, bytes | None, str]]:
        """Pickle the parsed index, if there is one, so that another rank need not parse it again."""
        index = vars(self).get("index")
        pickled = None if index is None else pickle.dumps(index)
        return SharedIndex, (self.folder, self.data, self.size, pickled, self.digest)

    def without_plans(self) -> SharedIndex:
        """Return this index with the ranks' plans, which are more than half of it, replaced by True."""
        short = strip_last(self.data, PLANS, _PARTS)
        if short is not None:
            shortened = SharedIndex(self.folder, short, self.size, digest=self.digest)
            with suppress(ContentError):  # the plans were not the last attribute
                if shortened.index.has_plans:
                    return shortened
        return self

    @cached_property
    def index(self) -> DcpIndex:
        """The parsed index; raises as `read_index` does."""
        if self._pickled is not None:
            with collector_paused():
                index: DcpIndex = pickle.loads(self._pickled)  # pickled by a rank of this job
            return index
        return _parse(lambda: self.data, self.folder / METADATA_FILE)


class FolderIndex:
    """The index of one folder, read and parsed once, on the first use.

    Attributes:
        folder: the iteration folder.
        shared: the index that another rank has read for this one; None if this rank reads it.
        is_checked: whether the digests of the folder's small files have been compared.
        checkpoint: the checkpoint that `open_checkpoint` has opened with this index and no other option.
    """

    def __init__(self, folder: Path, shared: SharedIndex | None = None) -> None:
        self.folder = folder
        self.shared = shared
        self.is_checked = shared is not None  # the other rank has compared them
        self.checkpoint: Any = None
        self._below: dict[str, FolderIndex] = {}
        self._contents: dict[Callable[[Path], DcpIndex], DcpIndex] = {}

    def is_of(self, folder: Path) -> bool:
        """Return whether this is the index of a folder."""
        return self.folder == folder or self.folder.resolve() == folder.resolve()

    @property
    def content(self) -> DcpIndex:
        """The parsed index; raises as `read_index` does."""
        return self.content_by(read_index) if self.shared is None else self.shared.index

    def content_by(self, read: Callable[[Path], DcpIndex]) -> DcpIndex:
        """Return the index that a format's own function reads from the folder, which is called once."""
        if read not in self._contents:
            self._contents[read] = read(self.folder)
        return self._contents[read]

    @cached_property
    def digest(self) -> str | None:
        """The digest of the index; None if it cannot be read."""
        return read_index_digest(self.folder) if self.shared is None else self.shared.digest

    def unshare(self) -> FolderIndex:
        """Return this index for this rank alone: what is parsed stays, the bytes for other ranks go."""
        alone = FolderIndex(self.folder)
        alone.is_checked = self.is_checked
        alone.checkpoint = self.checkpoint
        alone._contents = self._contents
        if self.shared is not None and "index" in vars(self.shared):
            alone._contents[read_index] = self.shared.index
            vars(alone).update(digest=self.shared.digest)
        return alone

    def below(self, name: str) -> FolderIndex:
        """Return the index of a subfolder."""
        return self._below.setdefault(name, FolderIndex(self.folder / name))


def read_index(folder: Path) -> DcpIndex:
    """Read `.metadata` of an iteration folder; see `FolderIndex`, which reads it once.

    Raises:
        UnreadableCheckpointError: the index is missing, damaged, or contradicts itself.
        UnsupportedCheckpointError: the records are compressed.
    """
    return _parse(partial(_read_metadata_file, folder), folder / METADATA_FILE)


def index_digest(data: bytes) -> str:
    """Return the digest of the content of `.metadata`, which is unique for each save.

    Torch's writers store an identifier of the save in it (`StorageMeta.save_id`,
    torch/distributed/checkpoint/filesystem.py, 2.4 to 2.15; `FileSystemWriterAsync.finish`,
    megatron/core/dist_checkpointing/strategies/filesystem_async.py, core_v0.8.0 to 0.19.2).
    """
    return blake2b(data, digest_size=16).hexdigest()


def read_index_digest(folder: Path) -> str | None:
    """Return the digest of the index of an iteration folder; None if it cannot be read."""
    with suppress(OSError):
        return index_digest(read_file(folder, METADATA_FILE, INDEX_BYTES))
    return None


def check_plans(folder: Path) -> None:
    """Check that the ranks' plans can be unpickled: Megatron's own loader reads them.

    Raises:
        CheckpointError: the plans, or other parts of the index, are damaged.
    """
    safe_loads(_read_metadata_file(folder), str(folder / METADATA_FILE))


def _read_metadata_file(folder: Path) -> bytes:
    try:
        return read_file(folder, METADATA_FILE, INDEX_BYTES)
    except OSError as error:
        raise unreadable_file("the checkpoint's index cannot be read", error, folder / METADATA_FILE) from error


def _parse(read: Callable[[], bytes], path: Path) -> DcpIndex:
    """Parse the bytes that `read` returns, called again if loading them without the ranks' plans fails."""
    with _reporting_damage(path):
        data = read()
        short = strip_last(data, PLANS, _PARTS)
        if short is not None:
            del data  # freed before objects are created: both are most of the memory of `inspect`
            metadata = _load_without_plans(short, str(path))
            if metadata is not None:
                return index_of(metadata)
            data = read()
        if not data:
            raise UnreadableCheckpointError(
                "the checkpoint's index is empty", found="0 bytes", where=str(path), hint=INTERRUPTED
            )
        return index_of(safe_loads(data, str(path)))


@contextmanager
def _reporting_damage(path: Path) -> Iterator[None]:
    """Report errors of parsing as damage; garbage collection is paused for millions of objects."""
    try:
        with collector_paused():
            yield
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
        # OverflowError comes from an infinite float.
        raise UnreadableCheckpointError(
            "the checkpoint's index is damaged", found=shorten(f"{type(error).__name__}: {error}"), where=str(path)
        ) from error


def _load_without_plans(short: bytes, where: str) -> Any:
    """Load an index without the ranks' plans, which are its last attribute and more than half of it.

    Returns:
        None if `short`, the index without plans, turns out to be something else.
    """
    with suppress(ContentError):  # raised again when the whole index is loaded
        index = safe_loads(short, where)
        if isinstance(index, MetadataStub) and getattr(index, PLANS, None) is True and hasattr(index, _PARTS[0]):
            return index
    return None
