"""Whether a source has changed while it was read: the state of its files before and after."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folder
from mcore_ckpt_ext.storage.paths import file_system, is_remote

SourceState = list[tuple[object, ...]]
"""For each file below a folder its name, its size, and what changes with its content."""

# By these marks, stores of fsspec distinguish contents of a file; marks that change when it is read are left out.
_MARKS = (
    "ETag", "etag", "generation", "md5Hash", "crc32c", "VersionId", "LastModified", "last_modified", "updated", "mtime",
    "created",
)  # fmt: skip


def state_before(source: Path) -> dict[Path, SourceState]:
    """The state of the folder that a source will be found to be, before anything of it is read."""
    with suppress(Exception):  # opening reports what is wrong, and a store may have errors of its own
        folder = iteration_folder(source)
        return {folder: state_of(folder)}
    return {}


def state_of(folder: Path) -> SourceState:
    """The state of all files below a folder.

    Of a file on this machine, the time of its last status change (ctime) counts beside that of its last modification:
    `touch -d` or `cp -p` set the latter, and no program sets the former. A file that was replaced has another inode.
    """
    if is_remote(folder):
        store = file_system(folder)
        store.invalidate_cache()  # its memory of what others wrote is old
        entries = sorted(store.find(str(folder.path), detail=True).items())  # type: ignore[attr-defined]  # remote
        marks = (
            (name, about, [about[mark] for mark in _MARKS if about.get(mark) is not None]) for name, about in entries
        )
        return [(name, int(about.get("size") or 0), repr(found)) for name, about, found in marks]
    return [(str(path.relative_to(folder)), *_marks(path)) for path in sorted(folder.rglob("*"))]


def _marks(path: Path) -> tuple[int, ...]:
    status = path.stat() if path.exists() else path.lstat()  # a link to nowhere is no reason to stop
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino


def check_unchanged(folder: Path, before: SourceState) -> None:
    """Refuse a source that is not in the state that it was in.

    Raises:
        UnreadableCheckpointError: a file of it was changed, replaced, added or removed.
    """
    after = state_of(folder)
    if after != before:
        changed = sorted({str(entry[0]) for entry in {*after} ^ {*before}})
        raise UnreadableCheckpointError(
            "the source changed while it was read; nothing was published", found=f"another state of {changed[0]}",
            where=str(folder), hint="convert a checkpoint that no job is writing",
        )  # fmt: skip
