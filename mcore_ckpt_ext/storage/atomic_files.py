"""Writes files atomically: flushed, then renamed in one step."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mcore_ckpt_ext.errors import DestinationError, StorageError, UsageError
from mcore_ckpt_ext.storage.paths import is_remote

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def cannot_write(path: Path, error: OSError) -> DestinationError:
    """Return the error to raise when the operating system cannot write to the destination."""
    # A name in an open folder is relative to that folder.
    named = Path(os.fsdecode(error.filename or "."))
    return DestinationError(
        "the destination cannot be written",
        found=error.strerror or str(error),
        where=str(named if named.is_absolute() else path),
        hint="free some space or choose another destination; --resume then continues where this run stopped"
        if _is_full(error)
        else "choose a destination that you may write to; --resume continues what this run began",
    )


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_report(path: Path, is_ours: Callable[[Path], bool], *, what: str, conflict: str, earlier: str) -> None:
    """Check, before anything is read, that a report may be written to a path.

    Args:
        path: the file to be written.
        is_ours: returns whether an existing file is such a report, which may be replaced.
        what: name of the report for messages, such as `the manifest`.
        conflict: message if an existing file may not be replaced.
        earlier: name of what may be replaced, such as `an earlier manifest`.

    Raises:
        UsageError: something else has this path, or its folder does not exist.
    """
    if path.is_dir() or (path.exists() and not is_ours(path)):
        raise UsageError(conflict, where=str(path), hint=f"choose a new file, or {earlier}")
    if is_remote(path):  # stores have no folders, and say when writing whether they accept a file
        return
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"the folder of {what} does not exist",
            where=str(path.absolute().parent),
            hint="create it, or choose another file",
        )


def write_report(path: Path, text: str, *, what: str) -> None:
    """Write a report atomically: a reader sees either the former or the new one, complete.

    Raises:
        DestinationError: the report cannot be written.
    """
    try:
        if is_remote(path):
            path.write_text(text)
        else:
            replace_files({path: text})
    except StorageError as error:
        raise DestinationError(f"{what} cannot be written", **error.details) from error
    except OSError as error:
        raise DestinationError(
            f"{what} cannot be written",
            found=error.strerror,
            where=str(path),
            hint=f"{'free some space, or ' if _is_full(error) else ''}choose a file that you may write to",
        ) from error


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk.

    Raises:
        OSError: flushing fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(paths: Iterable[Path]) -> None:
    """Flush files and folders concurrently, so that the file system waits for the disk only once.

    Raises:
        OSError: flushing fails.
    """
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(flush, paths):
            pass


def replace_files(files: Mapping[Path, str]) -> None:
    """Write small text files atomically: a reader sees each file either as it was or as it will be.

    Raises:
        OSError: writing fails; files that were not renamed yet are removed.
    """
    partials = {path: path.with_name(f"{path.name}.partial") for path in files}
    try:
        for path, partial in partials.items():
            # An existing link, which another user may have placed here, is removed and never followed.
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, _NEW | os.O_NOFOLLOW, 0o666), "wb") as stream:
                stream.write(files[path].encode("utf-8", "surrogateescape"))
        flush_all(partials.values())
        for path, partial in partials.items():
            partial.replace(path)
    except OSError:
        for partial in partials.values():
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        raise
