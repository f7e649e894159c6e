"""Opens regular files of an untrusted folder, and refuses links that lead out of it.

The content of a checkpoint is displayed and copied into results. A link in its folder to a private key must not copy
that key; reading a FIFO would block forever, and opening some devices has side effects.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from mcore_ckpt_ext.storage.paths import is_remote

SMALL_BYTES = 256 << 20
"""Larger than any file that describes a checkpoint; a tokenizer may have tens of MiB."""


def open_file(folder: Path, name: str) -> int:
    """Open a regular file of a local folder for reading, and return its descriptor.

    Links are followed within the folder, and in the cache of huggingface_hub, where snapshots link to a sibling folder
    `blobs` (`file_download.py`, `_create_symlink`, 0.20 to 1.x).

    Raises:
        OSError: the file is missing, is a link out of the folder, or is not a regular file; `strerror` names the cause.
    """
    real = Path(os.path.realpath(folder / name))
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise OSError(errno.ELOOP, f"a link leads out of the folder, to {real}", str(folder / name))
    if not stat.S_ISREG(real.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file, but a folder, a pipe or a device", str(folder / name))
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file, but a folder, a pipe or a device", str(folder / name))
    return descriptor


def read_file(folder: Path, name: str, limit: int = SMALL_BYTES) -> bytes:
    """Return the bytes of a file of a folder.

    Raises:
        OSError: as in `open_file`, or the file has more than `limit` bytes.
    """
    if is_remote(folder):
        path = folder / name
        if path.stat().st_size > limit:
            raise OSError(errno.EFBIG, f"more than {limit:,} bytes", str(path))
        return path.read_bytes()
    with os.fdopen(open_file(folder, name), "rb") as stream:
        if os.fstat(stream.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"more than {limit:,} bytes", str(folder / name))
        return stream.read()


def read_start(folder: Path, name: str, most: int) -> bytes:
    """Return the first `most` bytes of a file of a folder, or all bytes if it has fewer.

    Raises:
        OSError: as in `open_file`.
    """
    stream = (folder / name).open("rb") if is_remote(folder) else os.fdopen(open_file(folder, name), "rb")
    with stream:
        return stream.read(most)


def _roots(folder: Path) -> list[Path]:
    real = Path(os.path.realpath(folder))
    snapshots = real.parent
    return [real, snapshots.parent / "blobs"] if snapshots.name == "snapshots" else [real]
