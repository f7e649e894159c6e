"""Parses paths: local or remote, through fsspec (`s3://bucket/run`, `gs://...`, `memory://...`)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, cast

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError

_LOCAL = {"file", "local"}  # fsspec's protocols for local files


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path object; a remote one behaves like `pathlib.Path` (universal_pathlib).

    Raises:
        UnsupportedCheckpointError: the libraries for that store are not installed.
        UsageError: the path is empty, which would mean the current folder (usually a shell variable is unset); or it
            begins with ``~``, which would make a folder of that name.
    """
    if is_remote(path):
        found = cast("Path", path)
        # A local file given as a remote path is treated like every other local file.
        protocol = file_system(found).protocol
        is_local = not _LOCAL.isdisjoint([protocol] if isinstance(protocol, str) else protocol)
        return Path(found.path) if is_local else found  # type: ignore[attr-defined]
    text = os.fspath(path)
    if not text:
        raise UsageError("a path is empty", found="''", hint="pass a folder; `.` is the current one")
    scheme, separator, rest = text.partition("://")
    if not separator:
        if (text == "~" or text.startswith("~/")) and not os.path.lexists(text):
            raise UsageError(
                "a path begins with ~, which the shell has not expanded", found=text,
                hint=f"write {Path(text).expanduser()}, or leave the path out of quotation marks",
            )  # fmt: skip
        return Path(text)
    if scheme in _LOCAL:
        return Path(rest)
    try:
        from upath import UPath

        found = cast("Path", UPath(text))
    except (ImportError, ValueError) as error:
        raise UnsupportedCheckpointError(
            "this remote store needs a library that is not installed",
            found=str(error),
            where=text,
            hint="pip install universal_pathlib, and fsspec's library for the store (s3fs, gcsfs, adlfs, ...)",
        ) from error
    if not is_remote(found):
        raise UnsupportedCheckpointError(
            "the installed universal_pathlib is too old for remote stores",
            found=f"a {type(found).__name__} without a file system",
            expected="universal_pathlib 0.2.2 or later",
            where=text,
            hint="pip install 'universal_pathlib>=0.2.2'",
        )
    return found


def is_remote(path: object) -> bool:
    """Return whether a path object refers to a remote store."""
    return hasattr(path, "fs") and hasattr(path, "storage_options")


def file_system(path: Path) -> Any:
    """Return the fsspec file system of a remote path."""
    return cast("Any", path).fs


def relative_name(path: Path, folder: Path) -> str:
    """Return the path of a local or remote file, relative to a folder that contains it.

    Not by a remote path's `relative_to`: the relative paths of universal_pathlib 0.2 print with their scheme, like ``memory://a``
    (`UPath.relative_to` and `UPath.__str__`, upath/core.py, 0.2.2 to 0.2.6).

    Args:
        path: the file or folder.
        folder: a folder that contains it.
    """
    if not is_remote(folder):
        return path.relative_to(folder).as_posix()
    return PurePosixPath(cast("Any", path).path).relative_to(cast("Any", folder).path).as_posix()


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each file in a folder and its subfolders, by its path in the folder.

    Links to files are followed, links to folders are not. What may not be read is left out.
    """
    if is_remote(folder):
        files = (path for path in folder.rglob("*") if path.is_file())
        return {relative_name(path, folder): path.stat().st_size for path in files}
    # Not by `rglob`: checkpoints have thousands of files, and a path object takes ten times as long as a name.
    sizes: dict[str, int] = {}
    left = [""]
    while left:
        prefix = left.pop()
        with suppress(PermissionError), os.scandir(folder / prefix) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(f"{prefix}{entry.name}/")
                elif entry.is_file():
                    sizes[prefix + entry.name] = entry.stat().st_size
    return sizes
