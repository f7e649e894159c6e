"""Defaults that the command line shows.

This module imports nothing, so that help and usage errors need no torch.
"""

from __future__ import annotations

DEFAULT_WORKERS = 4
"""Number of threads that read, compare or write."""
DEFAULT_MEMORY = 1 << 30
"""Maximum number of bytes that a conversion holds in memory."""
