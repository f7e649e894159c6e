"""`mcore-ckpt --print-completion SHELL`: what a shell needs to complete the command line, by shtab if installed."""

from __future__ import annotations

import argparse

from mcore_ckpt_ext.errors import UsageError

SHELLS = ("bash", "zsh", "tcsh")
# How values are named in the help: folders, and files.
_FOLDERS, _FILES = ("PATH", "SRC", "DST", "A", "B", "FOLDER"), ("FILE",)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script that a user's shell evaluates.

    Args:
        parser: with the options of all commands.
        shell: one of `SHELLS`.

    Raises:
        UsageError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise UsageError("shell completion needs shtab, which is not installed", hint="pip install shtab") from error
    for action in _actions(parser):
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined] # shtab reads it
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    text: str = shtab.complete(parser, shell=shell)
    return text


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [inner for command in action.choices.values() for inner in _actions(command)]
    return found
