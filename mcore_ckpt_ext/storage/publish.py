"""Publishing a folder: written beside its destination under another name, and renamed when it is whole.

A kill at any moment leaves what was there before, or the new folder; what is unfinished bears `.partial-` in its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from mcore_ckpt_ext.errors import DestinationError

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, renameat2(2)
_AT_CURRENT_FOLDER = -100
_JOURNAL = "journal"


class Publication:
    """One destination folder in the making; `folder` is where its files are written."""

    def __init__(self, destination: Path, fingerprint: str, rank: int = 0) -> None:
        """Name the places; nothing is touched yet.

        Args:
            destination: the folder to publish.
            fingerprint: identifies what is written, so that only the same work is ever continued.
            rank: this process among those that share the work; the first opens and publishes.
        """
        self.destination = destination
        self._root = destination.parent / f"{destination.name}.partial-{fingerprint[:12]}"
        self.folder = self._root / "content"
        self._journal = self._root / f"{_JOURNAL}{rank}"
        self._lock: IO[str] | None = None

    def open(self, *, force: bool = False, resume: bool = False) -> None:
        """Make or reopen the unfinished folder.

        Args:
            force: replace an existing destination.
            resume: continue what an interrupted run left; otherwise it is written anew.

        Raises:
            DestinationError: the destination exists, cannot be written, or is being written by another process.
        """
        if self.destination.exists() and not force:
            raise DestinationError(
                "the destination exists already",
                where=str(self.destination),
                helps="choose another, or replace it: --force",
            )
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
            if not resume and self.folder.exists():
                shutil.rmtree(self.folder)
                for journal in self._journals():
                    journal.unlink()
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(self._root, error) from error

    def done(self) -> dict[int, int]:
        """Records that interrupted runs finished, with their CRC-32, by number."""
        found: dict[int, int] = {}
        for journal in self._journals():
            for line in journal.read_text().splitlines():
                try:
                    number, crc = json.loads(line)
                except ValueError:
                    continue  # the line that was being written when the process was killed
                found[number] = crc
        return found

    def note(self, number: int, crc: int) -> None:
        """Write into the journal that a record is finished."""
        descriptor = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, f"[{number}, {crc}]\n".encode())
        finally:
            os.close(descriptor)

    def _journals(self) -> list[Path]:
        return sorted(self._root.glob(f"{_JOURNAL}*"))

    def publish(self) -> None:
        """Flush all files and give the folder its name, in one step.

        Raises:
            DestinationError: the disk refuses; the destination is as it was.
        """
        try:
            for path in (*self.folder.rglob("*"), self.folder):
                flush(path)
            if self.destination.exists():
                _exchange(self.folder, self.destination)
            else:
                self.folder.rename(self.destination)
            flush(self.destination.parent)
            shutil.rmtree(self._root)
        except OSError as error:
            raise cannot_write(self.destination, error) from error

    def close(self) -> None:
        """Let go; what is unfinished stays for a later run."""
        if self._lock is not None:
            self._lock.close()

    def _locked(self) -> IO[str]:
        lock = (self._root / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise DestinationError(
                "another process is writing the same", where=str(self._root), helps="wait for it, or stop it"
            ) from error
        return lock


def cannot_write(path: Path, error: OSError) -> DestinationError:
    """The refusal that belongs to an error of the operating system."""
    return DestinationError(
        "the destination cannot be written",
        found=error.strerror or str(error),
        where=str(error.filename or path),
        helps="free some space or choose another destination; --resume then continues where this run stopped",
    )


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
            partial.write_text(files[path])
        flush_all(partials.values())
        for path, partial in partials.items():
            partial.replace(path)
    except OSError:
        for partial in partials.values():
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        raise


def _exchange(first: Path, second: Path) -> None:
    """Exchange the names of two folders, which no moment shows half done.

    Raises:
        OSError: the file system cannot.
    """
    library = ctypes.CDLL(None, use_errno=True)
    here = _AT_CURRENT_FOLDER
    if library.renameat2(here, os.fsencode(first), here, os.fsencode(second), _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(second))
