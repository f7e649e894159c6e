"""Reading and writing folders of a remote store through fsspec."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path

from mcore_ckpt_ext.errors import DestinationError, UnreadableCheckpointError
from mcore_ckpt_ext.storage.files import FolderReader, checked_name
from mcore_ckpt_ext.storage.paths import file_system, is_remote
from mcore_ckpt_ext.storage.publish import cannot_write

BLOCK_BYTES = 4 << 20
_KEPT_BLOCKS = 32
_JOURNAL = "journal"


def folder_reader(folder: Path) -> FolderReader:
    """The reader of a folder, wherever it is."""
    return RemoteFolderReader(folder) if is_remote(folder) else FolderReader(folder)


class RemoteFolderReader(FolderReader):
    """Reads byte ranges of remote files; small ranges come from blocks that are kept, for each request costs time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = file_system(folder)
        self._sizes: dict[str, int] = {}
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._guard = threading.Lock()

    def size(self, file: str) -> int:
        """See the base class."""
        if file not in self._sizes:
            try:
                self._sizes[file] = int(self._files.size(self._place(file)))
            except OSError as error:
                raise self._unreadable(file, error) from error
        return self._sizes[file]

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """See the base class."""
        end = offset + len(buffer)
        if end > self.size(file):
            raise UnreadableCheckpointError(
                "a file of the checkpoint is shorter than its metadata says",
                found=f"{self.size(file)} bytes",
                expected=f"at least {end} bytes",
                where=str(self.folder / file),
                helps="the save was interrupted or the copy is incomplete: use another iteration",
            )
        if len(buffer) >= BLOCK_BYTES:
            buffer[:] = self._range(file, offset, end)
        else:
            for number in range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                begin = number * BLOCK_BYTES
                block = self._block(file, number)
                low, high = max(offset, begin), min(end, begin + len(block))
                buffer[low - offset : high - offset] = block[low - begin : high - begin]
        with self._guard:
            self.bytes_read += len(buffer)

    def close(self) -> None:
        """Forget the kept blocks."""
        with self._guard:
            self._blocks.clear()

    def _block(self, file: str, number: int) -> bytes:
        with self._guard:
            known = self._blocks.get((file, number))
            if known is not None:
                self._blocks.move_to_end((file, number))
                return known
        begin = number * BLOCK_BYTES
        block = self._range(file, begin, min(begin + BLOCK_BYTES, self.size(file)))
        with self._guard:
            self._blocks[file, number] = block
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return block

    def _range(self, file: str, begin: int, end: int) -> bytes:
        try:
            data: bytes = self._files.cat_file(self._place(file), start=begin, end=end)
        except OSError as error:
            raise self._unreadable(file, error) from error
        if len(data) != end - begin:
            raise UnreadableCheckpointError(
                "a file of the checkpoint changed while it was read",
                found=f"{len(data)} bytes",
                expected=f"{end - begin} bytes",
                where=str(self.folder / file),
            )
        return data

    def _place(self, file: str) -> str:
        return str((self.folder / checked_name(file, self.folder)).path)  # type: ignore[attr-defined]  # a remote path

    def _unreadable(self, file: str, error: OSError) -> UnreadableCheckpointError:
        return UnreadableCheckpointError(
            "a file of the checkpoint cannot be read",
            found=error.strerror or str(error),
            where=str(self.folder / file),
            helps="the save was interrupted or the copy is incomplete: use another iteration",
        )


class Upload:
    """A destination folder of a remote store, in the making.

    No store renames a folder in one step. So files are put under their own names, those that say that all are there
    come last, and a journal beside the folder says what an interrupted upload has done.
    """

    def __init__(self, destination: Path, fingerprint: str, rank: int = 0) -> None:
        """See `Publication`."""
        self.destination = destination
        self._files = file_system(destination)
        self._beside = destination.parent / f"{destination.name}.partial-{fingerprint[:12]}"
        self._journal = self._beside / f"{_JOURNAL}{rank}"
        self._noted: dict[str, int] = {}
        self._guard = threading.Lock()

    def open(self, *, force: bool, resume: bool) -> None:
        """Check the destination.

        Raises:
            DestinationError: it exists, and no interrupted upload of the same made it.
        """
        if self.destination.exists() and not (resume and self._beside.exists()):
            raise DestinationError(
                "the destination exists already",
                where=str(self.destination),
                helps="choose another, delete it (a remote folder cannot be replaced in one step), or continue the "
                "interrupted conversion that made it: --resume",
            )

    def done(self) -> dict[str, int]:
        """Files that are there whole, with their sizes."""
        found: dict[str, int] = {}
        if self._beside.exists():
            for journal in self._beside.glob(f"{_JOURNAL}*"):
                found |= json.loads(journal.read_text())
        return found

    def put(self, local: Path, name: str) -> None:
        """Upload a file and write into the journal that it is there.

        Raises:
            DestinationError: the store refuses.
        """
        try:
            self._files.put_file(str(local), str((self.destination / name).path))  # type: ignore[attr-defined]  # remote
            with self._guard:
                self._noted[name] = local.stat().st_size
                self._beside.mkdir(parents=True, exist_ok=True)
                self._journal.write_text(json.dumps(self._noted))
        except OSError as error:
            raise cannot_write(self.destination, error) from error

    def publish(self) -> None:
        """Remove the journal: all is there."""
        self._files.rm(str(self._beside.path), recursive=True)  # type: ignore[attr-defined]  # a remote path

    def close(self) -> None:
        """Nothing is held."""
