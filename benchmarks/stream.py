"""The bound of a conversion: a copy of the same bytes by `sendfile`, with a flush of each file."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

from memory import files_of, remember  # memory.py in this folder

_AT_ONCE = 1 << 30


def readied(source: str, scratch: str) -> None:
    """Read a folder into the page cache, and prepare memory to write half as much again."""
    remember(Path(source))
    data = bytes(1 << 20)
    with Path(scratch).open("wb") as file:
        for _ in range(3 * sum(path.stat().st_size for path in files_of(Path(source))) // 2 >> 20):
            file.write(data)
    Path(scratch).unlink()


def main(source: str, destination: str) -> None:
    """Copy all files of a folder into a new one, and print seconds, processor seconds and bytes."""
    readied(source, f"{destination}.touched")
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    written = copy(source, destination)
    seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"seconds": seconds, "busy": busy, "bytes": written}))


def copy(source: str, destination: str) -> int:
    """Copy all files of a folder into a new one, flush them, and return the number of bytes."""
    Path(destination).mkdir()
    return sum(_copied(path, Path(destination) / str(number)) for number, path in enumerate(files_of(Path(source))))


def _copied(source: Path, destination: Path) -> int:
    done, size = 0, source.stat().st_size
    read, write = os.open(source, os.O_RDONLY), os.open(destination, os.O_WRONLY | os.O_CREAT)
    while done < size:
        done += os.sendfile(write, read, done, min(_AT_ONCE, size - done))
    os.fsync(write)
    os.close(write)
    os.close(read)
    return size
