"""One-line messages to the user, through the logger `mcore_ckpt_ext`.

A program that wants them elsewhere, or not at all, gives that logger a handler of its own (a `NullHandler` silences it)
or a level; until it does, they go to stderr.
"""

from __future__ import annotations

import logging
import os
import sys

from mcore_ckpt_ext.patching.singletons import PROCESS

NAME = "mcore_ckpt_ext"
PREFIX = f"[{NAME}] "


class LoggedLines(set[str]):
    """The lines said in this process: Megatron parses its arguments more than once, and once is enough for the user."""


class OwnHandler(logging.Handler):
    """Writes to whatever stderr is at the time, as long as the logger has no other handler."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        if logging.getLogger(NAME).handlers == [self]:
            sys.stderr.write(f"{PREFIX}{self.format(record)}\n")
            sys.stderr.flush()


def own_logger() -> logging.Logger:
    """The package's logger, with a handler and a level where the program gave it none.

    The level does not depend on that of the root logger, which Megatron sets late and by a flag (`setup_logging`,
    megatron/training/initialize.py, core_v0.7.0 to 0.19.2); and what is written here, the root logger's handlers need
    not repeat.
    """
    logger = logging.getLogger(NAME)
    if not logger.handlers:
        logger.addHandler(PROCESS.one(OwnHandler))
        logger.propagate = False
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    return logger


def is_logging_rank() -> bool:
    """Tell whether this process speaks for the job: rank 0, or no rank at all.

    Read from the variable that torchrun sets, since the hooks speak before torch.distributed starts.
    """
    return os.environ.get("RANK", "0") == "0"


def announce(line: str, *, every_rank: bool = False) -> None:
    """Tell the user one line: on rank 0 only, unless it is a line of one rank's own, and once in a process."""
    from mcore_ckpt_ext.errors import escape

    text, said = escape(" ".join(line.split())), PROCESS.one(LoggedLines)
    if (every_rank or is_logging_rank()) and text not in said:
        said.add(text)
        own_logger().info("%s", text)


def missing_extra_states_message(count: int, *, were_dropped: bool = False) -> str:
    """The line about extra states of this model's modules that a checkpoint does not have.

    Args:
        count: how many.
        were_dropped: the job that wrote it left out those that hold nothing but settings, which was asked of it by
            `--ckpt-drop-redundant-extra-state` (`_localize_redundant_extra_states`, megatron/training/checkpointing.py,
            development head of August 2026).
    """
    why = (
        "whose job left them out (--ckpt-drop-redundant-extra-state)"
        if were_dropped
        else "whose modules are of another kind"
    )
    return (
        f"{count} extra states of this model's modules are not in the checkpoint, {why}: "
        "they start empty, as in a fresh model"
    )
