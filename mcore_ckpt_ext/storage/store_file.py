"""Files of remote stores, open for reading."""

from __future__ import annotations

import io
import os
from typing import Any

from typing_extensions import Buffer, override

from mcore_ckpt_ext.storage.store_errors import translate_errors


class StoreFile(io.RawIOBase):
    """A file of a store, open for reading; errors of the store's library are translated."""

    def __init__(self, opened: Any, where: str) -> None:
        self._opened = opened
        self._where = where

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        return int(self._opened.seek(position, whence))

    @override
    def tell(self) -> int:
        return int(self._opened.tell())

    @override
    def readinto(self, buffer: Buffer) -> int:
        memory = memoryview(buffer).cast("B")
        with translate_errors(self._where):
            data = self._opened.read(len(memory))
        memory[: len(data)] = data
        return len(data)

    @override
    def close(self) -> None:
        if not self.closed:
            self._opened.close()
        super().close()
