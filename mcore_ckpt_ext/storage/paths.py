"""Paths of users: of this machine, or of a remote store through fsspec (`s3://bucket/run`, `gs://...`, `memory://...`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from mcore_ckpt_ext.errors import UnsupportedCheckpointError


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path object; a remote one behaves like `pathlib.Path` (universal_pathlib).

    Raises:
        UnsupportedCheckpointError: the libraries for that store are not installed.
    """
    if is_remote(path):
        return cast("Path", path)
    text = os.fspath(path)
    if "://" not in text:
        return Path(text)
    try:
        from upath import UPath

        return cast("Path", UPath(text))
    except (ImportError, ValueError) as error:
        raise UnsupportedCheckpointError(
            "this remote store needs a library that is not installed",
            found=str(error),
            where=text,
            helps="pip install 'mcore_ckpt_ext[remote]', and fsspec's library for the store (s3fs, gcsfs, adlfs, ...)",
        ) from error


def is_remote(path: object) -> bool:
    """Whether a path object belongs to a remote store."""
    return hasattr(path, "fs") and hasattr(path, "storage_options")


def file_system(path: Path) -> Any:
    """The fsspec file system of a remote path."""
    return cast("Any", path).fs
