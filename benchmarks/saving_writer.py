"""What the slowed writers of `saving.py` do; their process unpickles it, so it is a module that can be imported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def slowed(work: Callable[..., Any], seconds: float, *positional: Any, **keywords: Any) -> Any:
    """The same work, later."""
    time.sleep(seconds)
    return work(*positional, **keywords)
