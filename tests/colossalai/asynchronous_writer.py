"""Stands in for TensorNVMe's writer, which needs CUDA: it writes memory from a thread, and knows addresses only."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

_C = ctypes.CDLL(None)
_C.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong]


class AsyncFileWriter:
    """The writer as of November 2024 (async_file_io.py, pthread_backend.cpp); writes wait for `is_open`."""

    is_open = threading.Event()

    def __init__(self, path: str, n_entries: int = 16, backend: str | None = None, n_tasks: int = 0) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, mode=0o664)
        self._pool = ThreadPoolExecutor(1)
        self._futures: list[Future[None]] = []
        self.offset = 0

    def write(self, data: bytes) -> None:
        """Write bytes after those of the former calls."""
        memory = ctypes.create_string_buffer(data, len(data))
        self.write_raw(memory, ctypes.addressof(memory), len(data), self.offset)

    def write_raw(self, py_ref: object, buffer: int, n_bytes: int, offset: int) -> None:
        """Write memory at an offset, once the writers may write."""

        def write(_: object = py_ref) -> None:
            self.is_open.wait()
            _C.pwrite(self._file, buffer, n_bytes, offset)

        self._futures.append(self._pool.submit(write))
        self.offset += n_bytes

    def sync_before_step(self) -> None:
        """Do nothing: no tensor is on a GPU."""

    def synchronize(self) -> None:
        """Wait until everything is written."""
        self.is_open.set()
        for future in self._futures:
            future.result()

    def __del__(self) -> None:
        self.synchronize()
        os.close(self._file)
