"""The option with which several started processes share a command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

_JOIN = "--join"
STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Only torchrun sets it (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""


def add_join(parser: argparse._ActionsContainer) -> None:
    """Add `--join`."""
    parser.add_argument(
        _JOIN, action="store_true",
        help="split the work across the processes of the current torch.distributed job (default under torchrun)",
    )  # fmt: skip


def reports_errors(words: Sequence[str]) -> bool:
    """Return whether this process prints an error as JSON: of several, only rank 0 does."""
    rank = os.environ.get("RANK", "")
    is_shared = _JOIN in words or STARTED_BY_TORCHRUN in os.environ
    return not (is_shared and rank.isascii() and rank.isdigit() and int(rank) > 0)
