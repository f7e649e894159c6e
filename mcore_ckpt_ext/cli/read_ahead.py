"""Has the system read a checkpoint from the disk while Python imports torch, which takes a second or more.

The bytes go to the page cache and nowhere else: what a command reads later, it finds there.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mcore_ckpt_ext.storage.checked_files import open_file, read_start

# Commands that read every byte of their folders, and the options with which they do not.
_READ_ALL = {"verify": {"--quick"}, "diff": {"--kinds"}}
# Of which only the weights are read, on both sides.
_MODEL = "config.json"
# As `storage/checkpoint_dirs.py` has them, which imports torch.
_TRACKER, _RELEASE, _MOST_BYTES = "latest_checkpointed_iteration.txt", "release", 32
_AT_ONCE = 64 << 20
_AVAILABLE = re.compile(r"^MemAvailable: +(\d+) kB$", re.MULTILINE)


def begin_to_read(words: Sequence[str]) -> threading.Thread | None:
    """Start a thread that reads the checkpoints which a command line names, if its command will read all of them.

    Returns:
        The thread, which does not keep the process from ending; None where there is nothing to read ahead: the memory
        that is available could not hold twice as much, say.
    """
    if not words or words[0] not in _READ_ALL or _READ_ALL[words[0]] & set(words) or not hasattr(os, "RWF_NOWAIT"):
        return None
    with suppress(OSError, ValueError):
        folders = [_iteration(path) for path in map(Path, words[1:]) if path.is_dir()]
        if any((folder / _MODEL).exists() for folder in folders):
            return None
        files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
        if files and 2 * sum(path.stat().st_size for path in files) <= _available_memory():
            thread = threading.Thread(target=_read, args=(files,), name="mcore_ckpt_ext_read_ahead", daemon=True)
            thread.start()
            return thread
    return None


def _iteration(path: Path) -> Path:
    """The folder that the tracker file of a run folder names; any other path as it is."""
    with suppress(FileNotFoundError):
        text = read_start(path, _TRACKER, _MOST_BYTES).decode().strip()
        return path / (text if text == _RELEASE else f"iter_{int(text):07d}")
    return path


def _available_memory() -> int:
    """Bytes that the system could give without paging out (proc_meminfo(5)); 0 where it does not say."""
    found = _AVAILABLE.search(Path("/proc/meminfo").read_text())
    return int(found[1]) << 10 if found else 0


def _read(files: Sequence[Path]) -> None:
    """Have files read: `sendfile` to nowhere copies nothing, and leaves the interpreter to other threads."""
    with suppress(OSError):  # the command itself will say what is wrong
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for path in files:
                descriptor = open_file(path.parent, path.name)
                try:
                    for position, count in _parts_on_disk(descriptor):
                        os.sendfile(nowhere, descriptor, position, count)
                finally:
                    os.close(descriptor)
        finally:
            os.close(nowhere)


def _parts_on_disk(descriptor: int) -> Iterator[tuple[int, int]]:
    """Parts of a file, each its first byte and its length, of which the last byte is not in the page cache."""
    size, one = os.fstat(descriptor).st_size, bytearray(1)
    for position in range(0, size, _AT_ONCE):
        count = min(_AT_ONCE, size - position)
        try:
            os.preadv(descriptor, [one], position + count - 1, os.RWF_NOWAIT)
        except BlockingIOError:
            yield position, count
