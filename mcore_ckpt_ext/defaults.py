"""Defaults that the command line shows, in a module that imports nothing: help and usage errors need no torch."""

from __future__ import annotations

DEFAULT_WORKERS = 4
"""Threads that read, compare or write."""
DEFAULT_MEMORY = 1 << 30
"""Bytes that a conversion holds at once."""
