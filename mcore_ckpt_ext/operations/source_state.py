"""Detects that a source has changed while it was read, by the state of its files before and after."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folder
from mcore_ckpt_ext.storage.paths import is_remote

FolderState = list[tuple[object, ...]]
"""For each file below a folder its name, its size, and attributes that change with its content."""

# Attributes by which stores of fsspec identify contents of a file; attributes that change on reading are left out.
_MARKS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "crc32c",
    "VersionId",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)


def state_before(source: Path) -> dict[Path, FolderState]:
    """Return the state of the folder that a source path resolves to, before anything in it is read."""
    with suppress(CheckpointError, OSError):  # opening reports errors
        folder = iteration_folder(source)
        return {folder: folder_state(folder)}
    return {}


def folder_state(folder: Path) -> FolderState:
    """Return the state of all files below a folder.

    For a local file, the state includes the times of its last modification and of its last status change (ctime):
    programs such as `touch -d` and `cp -p` can set the first, but none can set the second. A file that was replaced has
    another inode.
    """
    if is_remote(folder):
        folder.forget_cache()
        marks = (
            (name, about, [about[mark] for mark in _MARKS if about.get(mark) is not None])
            for name, about in folder.find().items()
        )
        return [(name, int(about.get("size") or 0), repr(marks_of_file)) for name, about, marks_of_file in marks]
    return [(str(path.relative_to(folder)), *_marks(path)) for path in sorted(folder.rglob("*"))]


def _marks(path: Path) -> tuple[int, ...]:
    status = path.stat() if path.exists() else path.lstat()  # a dangling link is no error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino


def check_unchanged(states: Mapping[Path, FolderState]) -> None:
    """Refuse sources whose state has changed.

    Args:
        states: the state of each folder before anything in it was read.

    Raises:
        UnreadableCheckpointError: a file of it was changed, replaced, added or removed.
    """
    for folder, before in states.items():
        after = folder_state(folder)
        if after != before:
            changed = sorted({str(entry[0]) for entry in {*after} ^ {*before}})
            raise UnreadableCheckpointError(
                "the source changed while it was read; nothing was published",
                found=f"another state of {changed[0]}",
                where=str(folder),
                hint="convert a checkpoint that no job is writing",
            )
