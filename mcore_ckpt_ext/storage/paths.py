"""Parses paths: local or remote, through fsspec (`s3://bucket/run`, `gs://...`, `memory://...`)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard, cast

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.storage.store_path import StorePath

_LOCAL = {"file", "local"}  # fsspec's protocols for local files


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path object; one of a remote store has the methods of `pathlib.Path` (`StorePath`).

    Args:
        path: a path, an address like `s3://bucket/run`, or a path object of universal_pathlib.

    Raises:
        UnsupportedCheckpointError: the libraries for that store are not installed.
        StorageError: the libraries for that store cannot be used.
        UsageError: it is neither a string nor a path object; or it is empty, which would mean the current folder
            (usually a shell variable is unset); or it begins with ``~``, which would make a folder of that name.
    """
    if is_remote(path):
        return cast("Path", path)
    if hasattr(path, "fs") and hasattr(path, "storage_options"):  # of universal_pathlib
        files = path.fs
        key = str(cast("Any", path).path)
        # A local file given as a remote path is treated like every other local file.
        is_local = not _LOCAL.isdisjoint([files.protocol] if isinstance(files.protocol, str) else files.protocol)
        return Path(key) if is_local else cast("Path", StorePath.from_file_system(files, key))
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError("this is not a path", found=f"{path!r}", expected="a string or a path object")
    text = os.fspath(path)
    if not text:
        raise UsageError("a path is empty", found="''", hint="pass a folder; `.` is the current one")
    scheme, separator, rest = text.partition("://")
    if not separator:
        if (text == "~" or text.startswith("~/")) and not os.path.lexists(text):
            raise UsageError(
                "a path begins with ~, which the shell has not expanded",
                found=text,
                hint=f"write {Path(text).expanduser()}, or leave the path out of quotation marks",
            )
        return Path(text)
    return Path(rest) if scheme in _LOCAL else cast("Path", StorePath.of(text))


def local_path(path: str) -> Path:
    """Return a path of this machine.

    Raises:
        UsageError: it is one of a remote store.
    """
    parsed = as_path(path) if "://" in path else Path(path)
    if is_remote(parsed):
        raise UsageError("this option takes a path of this machine", found=path, hint="name a local file or folder")
    return parsed


def is_remote(path: object) -> TypeGuard[StorePath]:
    """Return whether a path object refers to a remote store."""
    return isinstance(path, StorePath)


def list_once(folder: Path) -> Path:
    """Return a folder for reading it as it is now; of a remote one, each folder is listed once."""
    return cast("Path", folder.list_once()) if is_remote(folder) else folder


def entry_names(folder: Path) -> list[str]:
    """Return the names of the files and folders in a local or remote folder.

    Raises:
        OSError: the folder cannot be read.
        StorageError: the remote store cannot be read.
    """
    if is_remote(folder):
        return [path.name for path in folder.iterdir()]
    # Checkpoints have thousands of files, and a path object takes ten times as long as a name.
    return os.listdir(folder)  # noqa: PTH208


def file_sizes(folder: Path, *, skip_forbidden: bool = False) -> dict[str, int]:
    """Return the size in bytes of each file in a folder and its subfolders, by its path in the folder.

    Links to files are followed, links to folders are not.

    Args:
        folder: a local or remote folder.
        skip_forbidden: leave out local folders that may not be read.

    Raises:
        OSError: a folder cannot be read.
        StorageError: the remote store cannot be read.
    """
    if is_remote(folder):
        return {name: status.st_size for name, status in folder.files_below().items()}
    # Not by `rglob`, for the reason of `entry_names`.
    sizes: dict[str, int] = {}
    left = [""]
    skipped = (PermissionError,) if skip_forbidden else ()
    while left:
        prefix = left.pop()
        with suppress(*skipped), os.scandir(folder / prefix) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(f"{prefix}{entry.name}/")
                elif entry.is_file():
                    sizes[prefix + entry.name] = entry.stat().st_size
    return sizes
