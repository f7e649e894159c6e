"""What happens to a writer process in tests; it is unpickled there, so it is a module that can be imported."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any


def troubled(work: Callable[..., Any], trouble: str, *positional: Any, **keywords: Any) -> Any:
    """Do the writer's work after something has happened: `sleep SECONDS`, `raise`, or the name of a signal."""
    if trouble.startswith("sleep"):
        time.sleep(float(trouble.split()[1]))
    elif trouble == "raise":
        raise ValueError("the writer has lost its pencil")
    else:
        os.kill(os.getpid(), signal.Signals[trouble])
    return work(*positional, **keywords)
