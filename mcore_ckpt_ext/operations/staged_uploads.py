"""Makes files in a temporary folder, and uploads some while it makes the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mcore_ckpt_ext.planning.write_plan import OutputFile
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.storage.remote import Upload

UPLOADS_AT_ONCE = 2
"""The number of files that are uploaded at once: the last requests of one need not delay the parts of the other."""
STAGED_BYTES = 4 << 30
"""The most bytes in the temporary folder, unless a single file is larger."""


class StagedUploads:
    """Files of a temporary folder; see `staged_uploads`."""

    def __init__(self, upload: Upload, folder: Folder, pool: ThreadPoolExecutor) -> None:
        self._upload = upload
        self._folder = folder
        self._pool = pool
        self._pending: dict[Future[None], int] = {}

    def add(self, file: OutputFile, make: Callable[[Folder], None]) -> None:
        """Make a file in the folder that `make` is given, as soon as there is room, and begin to upload it.

        Raises:
            DestinationError: an upload failed.
            CheckpointError: `make` raised it.
        """
        while self._pending and not self._has_room(file.length):
            self._finish(wait(self._pending, return_when=FIRST_COMPLETED).done)
        make(self._folder)
        self._pending[self._pool.submit(self._put, file.name)] = file.length

    def finish(self) -> None:
        """Wait for all uploads.

        Raises:
            DestinationError: an upload failed.
        """
        self._finish(wait(self._pending).done)

    def _has_room(self, nbytes: int) -> bool:
        """Return whether a file may be made: it is uploaded at once then, so that a failure loses no other."""
        return len(self._pending) < UPLOADS_AT_ONCE and sum(self._pending.values()) + nbytes <= STAGED_BYTES

    def _finish(self, uploads: set[Future[None]]) -> None:
        for upload in uploads:
            del self._pending[upload]
            upload.result()

    def _put(self, name: str) -> None:
        path = self._folder.path / name
        self._upload.put(path, name)
        path.unlink()


@contextmanager
def staged_uploads(upload: Upload) -> Iterator[StagedUploads]:
    """Yield an object that makes files and uploads them, and wait for all uploads at the end.

    After an error or an interrupt, uploads that are under way are finished, so that `--resume` need not repeat them.

    Raises:
        DestinationError: an upload failed.
    """
    with (
        TemporaryDirectory(prefix="mcore_ckpt_ext_") as staging,
        Folder.at(Path(staging)) as folder,
        ThreadPoolExecutor(UPLOADS_AT_ONCE, "mcore_ckpt_ext_upload") as pool,
    ):
        uploads = StagedUploads(upload, folder, pool)
        yield uploads
        uploads.finish()
