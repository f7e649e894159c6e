"""Reads two folders as one: files of the second folder are named by their full path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import override

from mcore_ckpt_ext.storage.files import FolderReader


class OverlayReader(FolderReader):
    """Reads files of one folder by their relative path, and files of another by `name_of`."""

    def __init__(self, own: FolderReader, other: FolderReader) -> None:
        super().__init__(own.folder)
        self._own = own
        self._other = other
        self._prefix = f"{other.folder}/"

    def name_of(self, file: str) -> str:
        """Return the name by which this reader finds a file of the other folder."""
        return self._prefix + file

    @override
    def past_cache(self) -> FolderReader:
        return OverlayReader(self._own.past_cache(), self._other.past_cache())

    @override
    def size(self, file: str) -> int:
        reader, name = self._place(file)
        return reader.size(name)

    @override
    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        reader, name = self._place(file)
        reader.read_into(name, offset, buffer)

    @override
    def read_rows(self, file: str, offset: int, stride: int, rows: Iterable[memoryview]) -> None:
        reader, name = self._place(file)
        reader.read_rows(name, offset, stride, rows)

    @override
    def scatter(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        reader, name = self._place(file)
        reader.scatter(name, offset, buffers)

    @override
    def close(self) -> None:
        self._own.close()
        self._other.close()

    def _place(self, file: str) -> tuple[FolderReader, str]:
        if file.startswith(self._prefix):
            return self._other, file.removeprefix(self._prefix)
        return self._own, file
