"""Failures of a writer process in tests, in an importable module, because they are unpickled there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def troubled(work: Callable[..., Any], trouble: str, *positional: Any, **keywords: Any) -> Any:
    """Do the writer's work after a failure: `raise`, the name of a signal, or `wait FILE` until the file exists."""
    if trouble.startswith("wait "):
        while not Path(trouble.removeprefix("wait ")).exists():
            time.sleep(0.01)
    elif trouble == "raise":
        raise ValueError("the writer has lost its pencil")
    else:
        os.kill(os.getpid(), signal.Signals[trouble])
    return work(*positional, **keywords)
