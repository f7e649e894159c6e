"""Parses paths: local or remote, through fsspec (`s3://bucket/run`, `gs://...`, `memory://...`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError

_LOCAL = {"file", "local"}  # fsspec's protocols for local files


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path object; a remote one behaves like `pathlib.Path` (universal_pathlib).

    Raises:
        UnsupportedCheckpointError: the libraries for that store are not installed.
        UsageError: the path is empty. It would mean the current folder; usually a shell variable is unset.
    """
    if is_remote(path):
        found = cast("Path", path)
        # A local file given as a remote path is treated like every other local file.
        return Path(found.path) if _LOCAL & set(_protocols(found)) else found  # type: ignore[attr-defined]
    text = os.fspath(path)
    if not text:
        raise UsageError("a path is empty", found="''", hint="pass a folder; `.` is the current one")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    if scheme in _LOCAL:
        return Path(rest)
    try:
        from upath import UPath

        return cast("Path", UPath(text))
    except (ImportError, ValueError) as error:
        raise UnsupportedCheckpointError(
            "this remote store needs a library that is not installed",
            found=str(error),
            where=text,
            hint="pip install universal_pathlib, and fsspec's library for the store (s3fs, gcsfs, adlfs, ...)",
        ) from error


def _protocols(path: Path) -> tuple[str, ...]:
    found = file_system(path).protocol
    return (found,) if isinstance(found, str) else tuple(found)


def is_remote(path: object) -> bool:
    """Return whether a path object refers to a remote store."""
    return hasattr(path, "fs") and hasattr(path, "storage_options")


def file_system(path: Path) -> Any:
    """Return the fsspec file system of a remote path."""
    return cast("Any", path).fs
