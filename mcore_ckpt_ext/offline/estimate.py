"""A short measurement of a disk, to say how long a conversion will take."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

_PROBE_BYTES = 64 << 20


def disk_rate(destination: Path) -> float:
    """Bytes a second that the disk below a folder writes durably, measured with one short file."""
    folder = next(path for path in (destination, *destination.parents) if path.is_dir())
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        begun = time.monotonic()
        for _ in range(_PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _PROBE_BYTES / max(time.monotonic() - begun, 1e-6)
