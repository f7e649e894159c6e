"""The option with which several started processes share a command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from mcore_ckpt_ext.cli.ranks import STARTED_BY_TORCHRUN, started_by_srun

_JOIN = "--join"
_JOINS_BY_ITSELF = "selftest"


def add_join(parser: argparse._ActionsContainer) -> None:
    """Add `--join`."""
    parser.add_argument(
        _JOIN,
        action="store_true",
        help="split the work across the processes of the current torch.distributed job or srun step (default under "
        "torchrun)",
    )


def reports_errors(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True if this process prints an error as JSON; only rank 0 of a shared command does.

    Processes of srun share a command if it has `--join`, and a self-test in any case. Otherwise each has a command of
    its own, with its own result.
    """
    rank = environment.get("RANK", "")
    if started_by_srun(environment) and STARTED_BY_TORCHRUN not in environment:
        is_shared = _JOIN in words or _JOINS_BY_ITSELF in words[:1]
        rank = rank or environment["SLURM_PROCID"]
    else:
        is_shared = _JOIN in words or STARTED_BY_TORCHRUN in environment
    return not (is_shared and rank.isascii() and rank.isdigit() and int(rank) > 0)
