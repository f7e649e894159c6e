"""Reading under limits: a small forged file must not block the test run."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path

from mcore_ckpt_ext.errors import CheckpointError

SECONDS, BYTES = 20, 3 << 30


def in_bounds(read: Callable[[], object], seconds: int = SECONDS) -> str:
    """Read in a child process limited to seconds of processor time, and return the message of a refusal, or ""."""
    parent, child = multiprocessing.get_context("fork").Pipe()

    def limited() -> None:
        space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            read()
        except CheckpointError as error:
            child.send(f"{type(error).__name__}: {error}")
        else:
            child.send("")

    process = multiprocessing.get_context("fork").Process(target=limited)
    process.start()
    child.close()
    try:
        found: str = parent.recv()
    except EOFError:
        found = "nothing: the child ended"
    process.join()
    assert process.exitcode == 0, f"{process.exitcode}, {found}"
    return found
