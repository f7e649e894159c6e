"""Logs one-line messages for the user through the logger `mcore_ckpt_ext`.

A program redirects or silences them by giving that logger a handler of its own (a `NullHandler` silences it) or a
level; by default they go to stderr.
"""

from __future__ import annotations

import logging
import os
import sys

from mcore_ckpt_ext.patching.singletons import PROCESS

NAME = "mcore_ckpt_ext"
PREFIX = f"[{NAME}] "


class LoggedLines(set[str]):
    """The lines logged in this process: each once, though Megatron parses its arguments repeatedly."""


class OwnHandler(logging.Handler):
    """Writes to the current stderr, as long as the logger has no other handler."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        if logging.getLogger(NAME).handlers == [self]:
            sys.stderr.write(f"{PREFIX}{self.format(record)}\n")
            sys.stderr.flush()


def own_logger() -> logging.Logger:
    """Return the package's logger, with a default handler and level if the program has set none.

    The level does not depend on that of the root logger, which Megatron sets late and by a flag (`setup_logging`,
    megatron/training/initialize.py, core_v0.7.0 to 0.19.2). Lines do not propagate, so that the root logger's handlers
    do not repeat them.
    """
    logger = logging.getLogger(NAME)
    if not logger.handlers:
        logger.addHandler(PROCESS.one(OwnHandler))
        logger.propagate = False
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    return logger


def is_logging_rank() -> bool:
    """Return True if this process logs for the job: rank 0, or a process without a rank.

    It reads the variable that torchrun sets, since the hooks log lines before torch.distributed is initialized.
    """
    return os.environ.get("RANK", "0") == "0"


def announce(line: str, *, every_rank: bool = False, each_time: bool = False) -> None:
    """Log a line for the user, once in a process and on rank 0 only.

    Args:
        line: the line; line breaks become spaces.
        every_rank: the line belongs to this rank, whichever it is.
        each_time: the line reports an event, and is logged each time that it happens.
    """
    from mcore_ckpt_ext.errors import escape

    text = escape(" ".join(line.split()))
    logged = PROCESS.one(LoggedLines)
    if (every_rank or is_logging_rank()) and (each_time or text not in logged):
        logged.add(text)
        own_logger().info("%s", text)


def missing_extra_states_message(count: int, *, were_dropped: bool = False) -> str:
    """Return the log line about extra states of this model's modules that a checkpoint lacks.

    Args:
        count: the number of extra states.
        were_dropped: the job that wrote the checkpoint dropped extra states that hold only settings, by
            `--ckpt-drop-redundant-extra-state` (`_localize_redundant_extra_states`, megatron/training/checkpointing.py,
            development head of August 2026).
    """
    why = (
        "whose job left them out (--ckpt-drop-redundant-extra-state)"
        if were_dropped
        else "whose modules are of another kind"
    )
    # Without `counted`: an interpreter that only finds this package installed imports this module, and no other.
    states = "1 extra state of this model's modules is" if count == 1 else f"{count} of this model's extra states are"
    return f"{states} not in the checkpoint, {why}: they start empty, as in a fresh model"
