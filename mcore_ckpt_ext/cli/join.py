"""The option with which several started processes share a command."""

from __future__ import annotations

import argparse


def add_join(parser: argparse._ActionsContainer) -> None:
    """Add `--join`."""
    parser.add_argument(
        "--join", action="store_true",
        help="split the work across the processes of the current torch.distributed job (default under torchrun)",
    )  # fmt: skip
