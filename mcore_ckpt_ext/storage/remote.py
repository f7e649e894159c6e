"""Reads and writes folders of remote stores through fsspec."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from typing_extensions import override

from mcore_ckpt_ext.errors import DestinationError, StorageError, unreadable_file
from mcore_ckpt_ext.storage.crc32 import crc32
from mcore_ckpt_ext.storage.files import FolderReader, checked_name, cut_short
from mcore_ckpt_ext.storage.paths import file_sizes, is_remote
from mcore_ckpt_ext.storage.read_ahead import PART_BYTES, FileRange, Item, ReadAhead
from mcore_ckpt_ext.storage.store_file import StoreFile
from mcore_ckpt_ext.storage.store_path import StorePath

_JOURNAL = "journal"
_CLAIM = "claim"


def folder_reader(folder: Path) -> FolderReader:
    """Return the reader for a local or remote folder."""
    return RemoteFolderReader(folder) if is_remote(folder) else FolderReader(folder)


class RemoteFolderReader(FolderReader):
    """Reads byte ranges of remote files, several at once, and small ones from blocks that it keeps."""

    checksum_block = PART_BYTES

    def __init__(self, folder: StorePath) -> None:
        super().__init__(cast("Path", folder))
        self._store_folder = folder
        self._sizes: dict[str, int] = {}
        self._guard = threading.Lock()
        self._requests = ReadAhead(self._fetch)

    @override
    def past_cache(self) -> FolderReader:
        return self

    @override
    def size(self, file: str) -> int:
        if file not in self._sizes:
            try:
                self._sizes[file] = self._path(file).stat().st_size
            except OSError as error:
                raise unreadable_file("a file of the checkpoint cannot be read", error, self.folder / file) from error
        return self._sizes[file]

    @override
    def sizes(self) -> dict[str, int]:
        with contextlib.suppress(OSError):  # `size` reports it
            self._sizes.update(file_sizes(self.folder))
        return self._sizes

    @override
    def read_ahead(self, items: Iterable[Item], ranges: Callable[[Item], Iterable[FileRange]]) -> Iterator[Item]:
        return self._requests.over(items, ranges)

    @override
    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        if end > self.size(file):
            raise cut_short(self.folder / file, self.size(file), end)
        self._requests.fill(file, offset, buffer)
        with self._guard:
            self.bytes_read += len(buffer)

    @override
    def read_rows(self, file: str, offset: int, stride: int, rows: Iterable[memoryview]) -> None:
        for row in rows:
            self.read_into(file, offset, row)
            offset += stride

    @override
    def scatter(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            self.read_into(file, offset, buffer)
            offset += len(buffer)

    def close(self) -> None:
        """Drop what was requested."""
        self._requests.close()

    def _path(self, file: str) -> StorePath:
        return self._store_folder / checked_name(file, self.folder)

    def _fetch(self, file: str, start: int, stop: int) -> bytes:
        return self._path(file).read_range(start, min(stop, self.size(file)))


class Upload:
    """An upload to a destination folder of a remote store.

    Remote stores cannot rename a folder atomically. So files are uploaded under their final names, and the files that
    make the folder a complete checkpoint come last. A journal next to the folder records the progress, so that an
    interrupted upload can continue. Stores have no locks either: a claim file next to the folder names the process that
    writes. It is never taken over without `--resume`, and is checked before each file.
    """

    def __init__(self, destination: StorePath, fingerprint: str, rank: int = 0) -> None:
        """Compute the paths; nothing is written yet."""
        self.destination = destination
        name = hashlib.sha256(str(destination).encode()).hexdigest()[:12]
        self._partial = destination.parent / f"{destination.name}.partial-{name}"
        self._journal = self._partial / f"{_JOURNAL}{rank}"
        self._fingerprint = fingerprint
        self._rank = rank
        self._claimed = [fingerprint, secrets.token_hex(8)]
        self._finished: dict[str, list[int]] = {}
        self._guard = threading.Lock()

    def open(self, *, resume: bool) -> None:
        """Check the destination, and write the claim.

        Raises:
            DestinationError: the destination exists or is claimed, except by an interrupted upload of the same
                conversion; or the store cannot be written.
        """
        work = self._claim()
        if work and not resume:
            raise DestinationError(
                "another conversion to this destination is under way, or was interrupted",
                where=str(self._partial),
                hint="wait for it; if none is running, continue it with --resume, or delete the destination and start "
                "again",
            )
        with self._reporting_destination():
            is_there = self.destination.exists()
        if is_there and not work:
            raise DestinationError(
                "the destination exists already",
                where=str(self.destination),
                hint="choose another, delete it (a remote folder cannot be replaced in one step), or continue the "
                "interrupted conversion that made it: --resume",
            )
        if resume and work and work[0] != self._fingerprint:
            raise DestinationError(
                "the interrupted conversion to this destination had another source, or other options",
                where=str(self._partial),
                hint="pass the options of the interrupted run, or delete the destination and start again",
            )
        with self._reporting_destination():
            self._partial.make_folder()
            (self._partial / _CLAIM).write_text(json.dumps(self._claimed))

    def join(self) -> None:
        """Join the upload in the processes that did not open it: they share the claim.

        Raises:
            DestinationError: the store cannot be read.
        """
        if self._rank:
            self._claimed = self._claim()

    def check_claim(self) -> None:
        """Check that the claim is still that of this upload.

        Raises:
            DestinationError: another conversion has claimed the destination, or the store cannot be read.
        """
        if self._claim() != self._claimed:
            raise DestinationError(
                "another conversion took the destination meanwhile; it may be incomplete",
                where=str(self._partial),
                hint="let one of them finish; or stop both, delete the destination and start again",
            )

    def _claim(self) -> list[str]:
        """Return the content of the claim file; empty if there is none."""
        with self._reporting_destination():
            try:
                claim = json.loads((self._partial / _CLAIM).read_text())
            except FileNotFoundError:
                return []
            except ValueError:
                return [""]  # of another process, incompletely written
        return claim if isinstance(claim, list) and claim else [""]

    def finished_files(self) -> dict[str, int]:
        """Return the files that an interrupted upload finished, with their sizes, after reading each back."""
        journaled: dict[str, list[int]] = {}
        with self._reporting_destination():
            for journal in self._partial.glob(f"{_JOURNAL}*") if self._partial.exists() else ():
                # It may be incomplete, because the process was killed.
                with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                    journaled |= json.loads(journal.read_text())
            self._finished = {
                name: size_and_crc
                for name, size_and_crc in journaled.items()
                if self._size_and_crc_of(name) == size_and_crc
            }
        return {name: size for name, (size, _) in self._finished.items()}

    def put(self, local: Path, name: str) -> None:
        """Upload a file, and record it in the journal. Several threads may each upload one.

        Raises:
            DestinationError: the store cannot be written, or another conversion has claimed the destination.
        """
        self.check_claim()
        with self._reporting_destination():
            self._path(name).upload(local)
            with local.open("rb") as stream:
                size_and_crc = _size_and_crc(stream)
            with self._guard:
                self._finished[name] = size_and_crc
                self._journal.write_text(json.dumps(self._finished))

    def withdraw(self, names: Iterable[str]) -> None:
        """Try to remove the files that make the folder a complete checkpoint, if the claim is still valid."""
        with contextlib.suppress(Exception):
            if self._claim() == self._claimed:
                for name in names:
                    self._finished.pop(name, None)
                    with contextlib.suppress(FileNotFoundError):
                        self._path(name).remove()
                self._journal.write_text(json.dumps(self._finished))

    def publish(self) -> list[str]:
        """Remove the journals and the claim of a finished upload.

        Returns:
            A note if that fails, since the destination is complete; usually empty.
        """
        try:
            for path in [*self._partial.glob(f"{_JOURNAL}*"), self._partial / _CLAIM]:
                path.remove()
            if self._partial.exists():  # in a store that has folders
                self._partial.remove(recursive=True)
        except (StorageError, OSError) as error:
            reason = error.details["found"] if isinstance(error, StorageError) else str(error)
            return [
                f"{self.destination} is complete, but its journal could not be removed ({reason}); "
                f"remove {self._partial}"
            ]
        return []

    def _path(self, name: str) -> StorePath:
        return self.destination / checked_name(name, cast("Path", self.destination))

    @contextlib.contextmanager
    def _reporting_destination(self) -> Iterator[None]:
        """Convert errors of the store into errors about the destination.

        Raises:
            DestinationError: the store cannot be read or written.
        """
        try:
            yield
        except (StorageError, FileNotFoundError) as error:
            details = error.details if isinstance(error, StorageError) else {"found": "a folder that does not exist"}
            hint = details.get("hint", "check the address")
            raise DestinationError(
                "the remote store cannot be written",
                found=details["found"],
                where=details.get("where", str(self.destination)),
                hint=f"{hint}; --resume continues what this run began",
            ) from error

    def _size_and_crc_of(self, name: str) -> list[int] | None:
        """Return size and CRC-32 of a file of the destination; None if there is none."""
        try:
            with self._path(name).open() as stream:
                return _size_and_crc(stream)
        except OSError:
            return None


def _size_and_crc(stream: IO[bytes] | StoreFile) -> list[int]:
    size = 0
    crc = 0
    while block := stream.read(PART_BYTES):
        size = size + len(block)
        crc = crc32(block, crc)
    return [size, crc]
