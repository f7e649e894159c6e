"""Plugin: what lies on a CPU is copied before a writer of nvidia-resiliency-ext gets it, as a GPU's tensor is.

Its writer copies what is on a GPU to the host, and reads everything else where it lies, while training changes it
(`preload_tensors`, nvidia_resiliency_ext/checkpointing/async_ckpt/filesystem_async.py, 0.6.0).
"""

from __future__ import annotations

import functools
from typing import Any

from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync


def install() -> None:
    """Wrap the planning of what is written."""
    original = FileSystemWriterAsync.prepare_write_data

    @functools.wraps(original)
    def prepare_write_data(self: Any, *positional: Any, **keywords: Any) -> None:
        original(self, *positional, **keywords)
        items, tensors = self.uncached_tensor_data
        self.uncached_tensor_data = items, [tensor.clone() for tensor in tensors]

    FileSystemWriterAsync.prepare_write_data = prepare_write_data


install()
