"""The errors of this package: a sentence, what was found, what was expected, where, and a hint."""

from __future__ import annotations

import traceback
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar

DETAILS = ("found", "expected", "where", "hint")
"""The labels of an error's details, in the order in which they are shown."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class CheckpointError(RuntimeError):
    """Base class of the errors that this package raises for users.

    It is a RuntimeError, because Megatron, ColossalAI and PyTorch raise one when they refuse a checkpoint: programs
    that catch theirs also catch this one. `patching.replaced_errors` adds the other errors of a patched function.

    Args:
        message: one sentence, what is wrong.
        found: what the checkpoint, the disk or the live model holds.
        expected: what had to be there.
        where: file, tensor, rank.
        hint: a command, flag or step that solves the problem; by default that of the error's class.

    Attributes:
        message: the sentence alone.
        details: the texts of `found`, `expected`, `where` and `hint`, where there are such.

    Example:
        >>> try:
        ...     convert("run", "run", TorchDist(), force=True)
        ... except CheckpointError as error:
        ...     print(type(error).__name__)
        DestinationError
    """

    _default_hint: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        found: object = None,
        expected: object = None,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        hint = self._default_hint if hint is None else hint
        values = zip(DETAILS, (found, expected, where, hint), strict=True)
        self.message = escaped(message, keeps="\n\t")  # as PyTorch's own messages have them
        self.details = {
            label: escaped(value if isinstance(value, str) else shown(value))
            for label, value in values
            if value is not None
        }
        super().__init__("; ".join([self.message, *(f"{label}: {text}" for label, text in self.details.items())]))
        self.found = found


class UnreadableCheckpointError(CheckpointError):
    """A file is missing, truncated, damaged, or not what its metadata says."""

    _default_hint = "use another copy, or another iteration where there is one"


class UnsafePickleError(CheckpointError):
    """A pickle requests a class or function that no checkpoint needs."""

    _default_hint = "do not load it with other software, which may execute its code; ask its author"


class UnsupportedCheckpointError(CheckpointError):
    """The checkpoint is intact, but of a kind that this package does not read."""


class PackingError(CheckpointError):
    """No packing of the gradient buffers could be verified."""


class ProofError(CheckpointError):
    """A parameter's fp32 master does not round to the weight stored beside it."""


class ModelMismatchError(CheckpointError):
    """The live model and the checkpoint do not describe the same parameters."""


class ResumeRefusedError(CheckpointError):
    """A rank refused to resume; raised on every rank with the reasons of all ranks."""


class SaveFailedError(CheckpointError):
    """A running job could not save a checkpoint; raised on every rank with the reasons of all ranks."""


class UsageError(CheckpointError):
    """An option is invalid: by itself, combined with the others, or for this checkpoint."""


class DestinationError(CheckpointError):
    """The destination exists already, or cannot be written; nothing was published."""


def escaped(text: str, keeps: str = "") -> str:
    """Escape control characters and characters that reverse the direction of text, except those in `keeps`."""
    return "".join(
        c if c.isprintable() or c in keeps else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def in_words(error: BaseException) -> str:
    """Return the text of an error; that of other packages begins with its class."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def with_indefinite_article(noun: str) -> str:
    """Return the noun with "a" or "an", by its pronunciation: "an MTP layer"."""
    alone = noun.startswith(("lm_", "mtp")) or (noun[:2].isupper() and noun[0] in "AEFHILMNORSX")
    return f"{'an' if alone or noun[:1] in 'aeioAEIO' else 'a'} {noun}"


_MOST_TEXT = 300


def shortened(text: str, most: int = _MOST_TEXT) -> str:
    """Escape and shorten an untrusted text for a message."""
    return escaped(text if len(text) <= most else f"{text[:most]}...")


_BRACKETS: dict[type, str] = {list: "[]", tuple: "()", set: "{}", frozenset: "{}", deque: "[]", dict: "{}"}
_OPAQUE = (Namespace, SimpleNamespace, bytes, bytearray, slice)
_MOST_ITEMS, _DEEPEST = 8, 3


def shown(value: object, depth: int = 0) -> str:
    """Format an untrusted value for a message; unlike `repr`, the result is always short."""
    if isinstance(value, str):
        return shortened(repr(value[:_MOST_TEXT]) if depth else value)
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length():,} bits"
    if isinstance(value, _OPAQUE):
        return f"a {type(value).__name__}"
    if type(value).__str__ is object.__str__:
        for kind, brackets in _BRACKETS.items():
            if isinstance(value, kind):
                return brackets[0] + (_items(value, depth + 1) if depth < _DEEPEST else "...") + brackets[1]
    return shortened(str(value))


def _items(value: Any, depth: int) -> str:
    first = list(islice(value, _MOST_ITEMS))
    texts = [shown(item, depth) for item in first]
    if isinstance(value, dict):
        texts = [f"{text}: {shown(value[key], depth)}" for key, text in zip(first, texts, strict=True)]
    more = len(value) - len(first)
    one = "," if type(value) is tuple and len(value) == 1 else ""
    return ", ".join(texts) + one + (f" and {more:,} more" if more else "")


@contextmanager
def reraise_as_unreadable(where: object) -> Iterator[None]:
    """Turn any error that untrusted metadata causes into an UnreadableCheckpointError.

    Raises:
        UnreadableCheckpointError: instead of the error that a value of a wrong type, range or name causes.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise UnreadableCheckpointError(
            "invalid metadata in the checkpoint: it is damaged, or of an unknown kind",
            found=f"{shortened(f'{type(error).__name__}: {error}')} ({at.name}, line {at.lineno})",
            where=str(where),
            hint="use another iteration, or find the damage: mcore-ckpt verify PATH; if it finds no error, please "
            "report this",
        ) from error


INTERRUPTED = "the save was interrupted or the copy is incomplete: use another iteration"
"""The hint where a part of a checkpoint is missing."""


def io_hint(error: OSError) -> str:
    """Return the hint for a file of a checkpoint that cannot be opened."""
    if isinstance(error, PermissionError):
        return "read it as a user with permission, or ask its owner for permission (chmod)"
    if isinstance(error, FileNotFoundError):
        return INTERRUPTED
    return "check the disk and the file system, or use another iteration"


def some(names: Sequence[str], shown: int = 4) -> str:
    """The first names, and how many more there are."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more:,} more" if more > 0 else "")


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks for a message, three or more in a row as a range: `0 to 7, 9, 11`.

    Args:
        ranks: in ascending order.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return some(
        [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))],
        shown=8,
    )


def readable(size: int) -> str:
    """A size with three digits and a unit: `1.50 GiB`."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.{max(0, 3 - len(str(int(value))))}f} {_UNITS[unit]}"
