"""Files that reach the disk whole: flushed, and replaced in one step; and the error where the disk refuses."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mcore_ckpt_ext.errors import DestinationError, UsageError, io_hint

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def cannot_write(path: Path, error: OSError) -> DestinationError:
    """The refusal that belongs to an error of the operating system."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return DestinationError(
        "the destination cannot be written",
        found=error.strerror or str(error),
        where=str(error.filename or path),
        hint="free some space or choose another destination; --resume then continues where this run stopped"
        if full else "choose a destination that you may write to; --resume continues what this run began",
    )  # fmt: skip


def check_report(path: Path, is_ours: Callable[[Path], bool], *, what: str, conflict: str, earlier: str) -> None:
    """Refuse a place for a report of this package where something else lies, before anything is read.

    Args:
        path: the file.
        is_ours: whether a file is such a report, which may be replaced.
        what: the report, as in `the manifest`.
        conflict: the sentence where it may not be.
        earlier: what may be, as in `an earlier manifest`.

    Raises:
        UsageError: there is something else, or no folder to write it to.
    """
    if path.is_dir() or (path.exists() and not is_ours(path)):
        raise UsageError(conflict, where=str(path), hint=f"choose a new file, or {earlier}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"the folder of {what} does not exist", where=str(path.absolute().parent),
                         hint="create it, or choose another file")  # fmt: skip


def write_report(path: Path, text: str, *, what: str) -> None:
    """Write a report so that a reader sees the former one or this, whole.

    Raises:
        DestinationError: it cannot be written.
    """
    try:
        replace({path: text})
    except OSError as error:
        raise DestinationError(
            f"{what} cannot be written", found=error.strerror, where=str(path), hint=io_hint(error)
        ) from error


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk.

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(paths: Iterable[Path]) -> None:
    """Flush files and folders at the same time: a file system then waits for the disk once, not once for each.

    Raises:
        OSError: the disk refuses.
    """
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(flush, paths):
            pass


def replace(files: Mapping[Path, str]) -> None:
    """Write small files, given their texts, so that a reader sees each as it was or as it is to be, whole.

    Raises:
        OSError: the disk refuses; what has not taken its name is gone.
    """
    partials = {path: path.with_name(f"{path.name}.partial") for path in files}
    try:
        for path, partial in partials.items():
            # A link, planted or left there, is removed and never followed.
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, _NEW | os.O_NOFOLLOW, 0o666), "w") as stream:
                stream.write(files[path])
        flush_all(partials.values())
        for path, partial in partials.items():
            partial.replace(path)
    except OSError:
        for partial in partials.values():
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        raise
