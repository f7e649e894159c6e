"""One-line messages to the user, visible whether or not logging is configured yet."""

from __future__ import annotations

import os
import sys

PREFIX = "[mcore_ckpt_ext] "
# Megatron parses its arguments more than once: what was said need not be said again.
_said: set[str] = set()


def is_first_rank() -> bool:
    """Tell whether this process speaks for the job: rank 0, or no rank at all.

    Read from the variable that torchrun sets, since the hooks speak before torch.distributed starts.
    """
    return os.environ.get("RANK", "0") == "0"


def announce(line: str, *, every_rank: bool = False) -> None:
    """Write one line to stderr, on rank 0 only unless it is some rank's own, and each line once in a process.

    Not through logging: Megatron raises or sets levels late and by its own flags, and what this package
    changes in a job must be seen without any of them.
    """
    text = " ".join(line.split())
    if (every_rank or is_first_rank()) and text not in _said:
        _said.add(text)
        sys.stderr.write(f"{PREFIX}{text}\n")
        sys.stderr.flush()
