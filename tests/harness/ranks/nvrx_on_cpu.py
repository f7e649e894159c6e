"""Plugin: CPU tensors are copied before a writer of nvidia-resiliency-ext gets them, as GPU tensors are.

The writer copies GPU tensors to the host, but reads all others in place, while training changes them
(`preload_tensors`, nvidia_resiliency_ext/checkpointing/async_ckpt/filesystem_async.py, 0.6.0 and 0.7.0).
"""

from __future__ import annotations

import functools
from typing import Any

from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync


def install() -> None:
    """Wrap the planning of writes."""
    original = FileSystemWriterAsync.prepare_write_data

    @functools.wraps(original)
    def prepare_write_data(self: Any, *positional: Any, **keywords: Any) -> None:
        original(self, *positional, **keywords)
        print(f"{original.__module__} prepares a write", flush=True)
        if self.uncached_tensor_data:  # 0.7.0 copies the others itself, into memory that it shares with the writer
            items, tensors = self.uncached_tensor_data
            self.uncached_tensor_data = items, [tensor.clone() for tensor in tensors]

    FileSystemWriterAsync.prepare_write_data = prepare_write_data


install()
