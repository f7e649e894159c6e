"""Opens regular files of an untrusted folder, and refuses links that lead out of it.

The content of a checkpoint is displayed and copied into results. A link in its folder to a private key must not copy
that key; reading a FIFO would block forever, and opening some devices has side effects.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from mcore_ckpt_ext.errors import RefusedFileError, is_answer, unreadable_file
from mcore_ckpt_ext.storage.paths import is_remote

SMALL_BYTES = 256 << 20
"""Larger than any file that describes a checkpoint; a tokenizer may have tens of MiB."""


def open_file(folder: Path, name: str) -> int:
    """Open a regular file of a local folder for reading, and return its descriptor.

    Links are followed within the folder, and in the cache of huggingface_hub, where snapshots link to a sibling folder
    `blobs` (`file_download.py`, `_create_symlink`, 0.20 to 1.x).

    Raises:
        OSError: the file is missing, is a link out of the folder, or is not a regular file; `strerror` names the cause.
        StorageError: the file cannot be read, for example without permission or from a broken disk.
    """
    path = os.path.join(folder, name)  # noqa: PTH118  a `Path` takes longer than opening, and a job checks thousands
    with translate_os_errors(path):
        is_in_folder = os.sep not in name and stat.S_ISREG(os.lstat(path).st_mode)  # as most: no link to follow
        real = path if is_in_folder else _resolve(folder, path)
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_regular(os.fstat(descriptor), path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def readable_sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each regular file in a local folder, by its name.

    Files that this process may not read are left out, and links. No file is opened, which is a request of its own for
    each on a network's file system.

    Raises:
        OSError: the folder cannot be read.
    """
    sizes = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False) and os.access(entry.path, os.R_OK):
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def _resolve(folder: Path, path: str) -> str:
    """Return the regular file to which a path leads, through links within the folder."""
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise RefusedFileError(errno.ELOOP, f"a link leads out of the folder, to {real}", path)
    _check_regular(real.stat(), path)
    return str(real)


def _check_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RefusedFileError(errno.EINVAL, "not a regular file, but a folder, a pipe or a device", path)


def read_file(folder: Path, name: str, limit: int = SMALL_BYTES) -> bytes:
    """Return the bytes of a file of a folder.

    Raises:
        OSError: as in `open_file`, or the file has more than `limit` bytes.
    """
    if is_remote(folder):
        path = folder / name
        _check_size(path.stat().st_size, limit, path)
        return path.read_bytes()
    with translate_os_errors(folder / name), os.fdopen(open_file(folder, name), "rb") as stream:
        _check_size(os.fstat(stream.fileno()).st_size, limit, folder / name)
        return stream.read()


def _check_size(size: int, limit: int, path: object) -> None:
    if size > limit:
        raise RefusedFileError(errno.EFBIG, f"more than {limit:,} bytes", str(path))


def read_start(folder: Path, name: str, limit: int) -> bytes:
    """Return the first `limit` bytes of a file of a folder, or all bytes if it has fewer.

    Raises:
        OSError: as in `open_file`.
    """
    with open_stream(folder, name) as stream, translate_os_errors(folder / name):
        return stream.read(limit)


def open_stream(folder: Path, name: str) -> BinaryIO:
    """Open a regular file of a local or remote folder for reading; raises as `open_file` does."""
    if is_remote(folder):
        return cast("BinaryIO", (folder / name).open())
    return os.fdopen(open_file(folder, name), "rb")


@contextmanager
def translate_os_errors(path: Path | str) -> Iterator[None]:
    """Convert errors of the operating system that say nothing about a file's content.

    Raises:
        StorageError: the file cannot be read, for example without permission or from a broken disk.
    """
    try:
        yield
    except OSError as error:
        if is_answer(error):
            raise
        raise unreadable_file("a file cannot be read", error, path) from error


def is_stored(path: Path) -> bool:
    """Return whether a file or folder exists.

    A link that leads to itself is an error; `Path.exists` takes it for a missing file.

    Raises:
        StorageError: the system does not say.
    """
    with translate_os_errors(path):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def _roots(folder: Path) -> list[Path]:
    real = Path(os.path.realpath(folder))
    snapshots = real.parent
    return [real, snapshots.parent / "blobs"] if snapshots.name == "snapshots" else [real]
