"""Folders opened by descriptor, so that nothing below them is ever reached through a link.

A path is resolved at each use. In a folder that other users may write to, any part of it may have been replaced by a
link. A descriptor always refers to the folder that was opened (openat(2), `O_NOFOLLOW`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_REPLACE = 1  # RENAME_NOREPLACE of Linux, renameat2(2)
_EXCHANGE = 2  # RENAME_EXCHANGE
_NOT_OFFERED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class Folder:
    """An open folder; `path` is for messages only. All methods raise OSError if a system call fails."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @classmethod
    def at(cls, path: Path) -> Folder:
        """Open a folder by path. Links in this path are the user's own and are followed."""
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)

    def status(self, name: str | None = None) -> os.stat_result | None:
        """Return the status of an entry (links are not followed) or of the folder; None if there is none."""
        if name is None:
            return os.fstat(self.descriptor)
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        return None

    def make(self, name: str, mode: int = 0o777) -> None:
        """Create a subfolder, which must not exist yet."""
        os.mkdir(name, mode, dir_fd=self.descriptor)

    def enter(self, name: str) -> Folder:
        """Open a subfolder, which must not be a link."""
        return Folder(os.open(name, _FOLDER, dir_fd=self.descriptor), self.path / name)

    def open(self, file: str, flags: int, mode: int = 0o666) -> int:
        """Open a file and return its descriptor; `O_CREAT` in `flags` also creates missing subfolders."""
        *folders, name = PurePosixPath(file).parts
        held: list[Folder] = []
        try:
            for part in folders:
                within = held[-1] if held else self
                if flags & os.O_CREAT:
                    with contextlib.suppress(FileExistsError):
                        within.make(part)
                held.append(within.enter(part))
            within = held[-1] if held else self
            # Without O_NONBLOCK, opening a FIFO that another user placed here would block.
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(name, flags, mode, dir_fd=within.descriptor)
        finally:
            for folder in held:
                folder.close()
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(self.path / file))
        return descriptor

    def read(self, file: str, limit: int) -> bytes | None:
        """Return the first `limit` bytes of a file; None if the file does not exist."""
        try:
            descriptor = self.open(file, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as stream:
            return stream.read(limit)

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        return sorted(os.listdir(self.descriptor))  # noqa: PTH208  a descriptor is no path

    def folders(self) -> Iterator[tuple[Folder, list[str]]]:
        """Yield all subfolders, the deepest first, and this folder, each with the names of its other entries."""
        others = []
        for name in self.names():
            status = self.status(name)
            if status is not None and stat.S_ISDIR(status.st_mode):
                with self.enter(name) as below:
                    yield from below.folders()
            elif status is not None:
                others.append(name)
        yield self, others

    def remove(self, name: str) -> None:
        """Remove an entry with its content, if it exists."""
        status = self.status(name)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=self.descriptor)
            return
        with self.enter(name) as folder:
            for below in folder.names():
                folder.remove(below)
        os.rmdir(name, dir_fd=self.descriptor)

    def flush(self) -> None:
        """Flush the folder and its content to the disk."""
        for folder, files in self.folders():
            for file in files:
                descriptor = folder.open(file, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            os.fsync(folder.descriptor)


def move_new(source: Folder, name: str, target: Folder, new_name: str) -> None:
    """Move a folder to an unused name, atomically.

    Raises:
        FileExistsError: the name is in use; nothing was moved.
        OSError: the system call fails; nothing was moved.
    """
    try:
        _rename(source, name, target, new_name, _NO_REPLACE)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        # The file system lacks this flag. An empty folder reserves the name: a rename only replaces empty folders.
        target.make(new_name, 0o700)
        try:
            os.rename(name, new_name, src_dir_fd=source.descriptor, dst_dir_fd=target.descriptor)
        except OSError as refused:
            with contextlib.suppress(OSError):
                os.rmdir(new_name, dir_fd=target.descriptor)
            if refused.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target.path / new_name)) from refused
            raise


def exchange(first: Folder, name: str, second: Folder, other: str) -> bool:
    """Exchange the names of two folders atomically; return False if the system cannot do this.

    Raises:
        OSError: the system call fails.
    """
    try:
        _rename(first, name, second, other, _EXCHANGE)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        return False
    return True


def _rename(source: Folder, name: str, target: Folder, new_name: str, flags: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    old = os.fsencode(name)
    new = os.fsencode(new_name)
    if library.renameat2(source.descriptor, old, target.descriptor, new, flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target.path / new_name))
