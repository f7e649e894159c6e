"""Reads and copies folders past the page cache, as fast as the disk allows, and says what machine this is."""

from __future__ import annotations

import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from memory import files_of, fresh  # memory.py in this folder

_BLOCK = 4 << 20
_PROBE = 1 << 30


def read(*folders: str) -> None:
    """Read all files of some folders with two threads."""
    files = [path for folder in folders for path in files_of(Path(folder))]
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
    sizes = [path.stat().st_size for path in files]

    def one(number: int, start: int, block: memoryview) -> None:
        os.preadv(descriptors[number], [block], start)

    _each_block(sizes, one)


def copy(source: str, destination: str) -> None:
    """Copy all files of a folder into a new one with two threads, and flush them."""
    files = files_of(Path(source))
    sizes = [path.stat().st_size for path in files]
    Path(destination).mkdir()
    copies = [Path(destination) / str(number) for number in range(len(files))]
    readers = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
    writers = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT) for path in copies]
    for writer, size in zip(writers, sizes, strict=True):
        if size:
            os.posix_fallocate(writer, 0, -(-size // _BLOCK) * _BLOCK)

    def one(number: int, start: int, block: memoryview) -> None:
        os.preadv(readers[number], [block], start)
        os.pwrite(writers[number], block, start)  # the last block whole: its end is cut off below

    _each_block(sizes, one)
    for writer, size in zip(writers, sizes, strict=True):
        os.ftruncate(writer, size)
        os.fsync(writer)


def machine(folder: Path) -> str:
    """Return a line about the processors, the memory and the disk of a folder, with its rates of direct I/O."""
    path = folder / "probe" / "file"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    os.truncate(path, _PROBE)
    written = path.parent.with_name("probe-copy")
    seconds = {}
    copy(str(path.parent), str(written))  # a file without holes
    ways: dict[str, Callable[[], None]] = {
        "read": lambda: read(str(written)),
        "copied": lambda: copy(str(written), f"{written}2"),
    }
    for what, function in ways.items():
        begun = time.monotonic()
        function()
        seconds[what] = time.monotonic() - begun
    for left in (path, *written.iterdir(), *Path(f"{written}2").iterdir()):
        left.unlink()
    for left in (path.parent, written, Path(f"{written}2")):
        left.rmdir()
    rates = ", ".join(f"{what} {_PROBE / took / 1e9:.1f} GB/s" for what, took in seconds.items())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    about = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in about if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} processors ({model}), {memory} GiB, Linux {platform.release()}; direct I/O: {rates}"


def _each_block(sizes: list[int], call: Callable[[int, int, memoryview], None]) -> None:
    """Call a function with each block of files of these sizes, from two threads with memory of their own."""
    blocks: Iterator[tuple[int, int]] = (
        (number, start) for number, size in enumerate(sizes) for start in range(0, size, _BLOCK)
    )
    lock = threading.Lock()

    def work() -> None:
        block = _huge()
        while True:
            with lock:
                place = next(blocks, None)
            if place is None:
                return
            call(*place, block)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _huge() -> memoryview:
    """Return a block in huge pages, of which the disk takes more at once."""
    memory = fresh(_BLOCK)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:_BLOCK]
