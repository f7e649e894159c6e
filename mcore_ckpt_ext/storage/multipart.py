"""Bounds the memory of an upload by fsspec: a file is sent in parts, few of them at once.

The options have one name each in the file systems that have them: `chunksize` in s3fs and gcsfs, `max_concurrency` in
s3fs and adlfs (`_put_file` of s3fs 2026.9, gcsfs 2026.10, adlfs 2026.8). By default s3fs holds ten parts of 50 MiB.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

UPLOAD_BYTES = 16 << 20
"""The most bytes of a file that are in memory while it is uploaded, for files of up to 156 GiB."""
_PART_BYTES = 8 << 20
# S3 accepts parts with numbers up to 10,000; s3fs does not enlarge parts whose size is given (`calculate_chunksize`).
_MOST_PARTS = 10_000
# The parts of gcsfs are multiples of 256 KiB (`GCS_MIN_BLOCK_SIZE`, gcsfs/core.py).
_UNIT = 1 << 20


def upload_options(put_file: Callable[..., object], size: int) -> dict[str, int]:
    """Return options that bound the memory of `put_file` for a file of `size` bytes.

    It has all of them: those that it does not have are left out.
    """
    least = -(-size // _MOST_PARTS)
    part = max(_PART_BYTES, -(-least // _UNIT) * _UNIT)
    options = {"chunksize": part, "max_concurrency": max(1, UPLOAD_BYTES // part)}
    parameters = inspect.signature(put_file).parameters
    return {name: value for name, value in options.items() if name in parameters}
