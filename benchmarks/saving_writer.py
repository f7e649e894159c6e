"""The slowed writers of `saving.py`, in an importable module, because their process unpickles them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def slowed(work: Callable[..., Any], seconds: float, *positional: Any, **keywords: Any) -> Any:
    """Do the same work after a delay."""
    time.sleep(seconds)
    return work(*positional, **keywords)
