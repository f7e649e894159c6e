"""Repeats options that take assignments (`--argument a=1 b=2`), once for each."""

from __future__ import annotations

import re
from collections.abc import Sequence

ARGUMENT_HELP = (
    "Megatron argument used in training, if it is missing from the checkpoint; several may follow, or repeat the option"
)
"""What `--argument` means in every command."""
_OPTIONS = frozenset({"--argument", "--change", "--pin", "--rehearse"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def repeat_options(words: Sequence[str]) -> list[str]:
    """Return a command line in which every assignment follows an option of its own.

    Argparse's `nargs="+"` would also take the paths that follow the assignments.

    Args:
        words: the command line, such as `convert --argument a=1 b=2 SRC DST`.

    Returns:
        The same with `--argument a=1 --argument b=2`.
    """
    repeated: list[str] = []
    option = ""
    for word in words:
        if word.startswith("-"):
            name = word.partition("=")[0]
            option = name if name in _OPTIONS else ""
        elif not _ASSIGNMENT.match(word):
            option = ""
        elif option and repeated[-1] != option:
            repeated.append(option)
        repeated.append(word)
    return repeated
