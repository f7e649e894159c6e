"""Defaults that the command line shows.

This module imports nothing, so that help and usage errors need no torch.
"""

from __future__ import annotations

SCHEMAS = {"inspect": 8, "convert": 3, "verify": 5, "diff": 6, "plan": 5, "doctor": 1, "selftest": 1}
"""Version of the `--json` output of each command; raised with every change."""
DEFAULT_WORKERS = 4
"""Number of threads that read, compare or write."""
DEFAULT_MEMORY = 1 << 30
"""Maximum number of bytes that a conversion holds in memory."""
