"""The errors of this package: a sentence, what was found, what was expected, where, and a hint."""

from __future__ import annotations

import traceback
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar

DETAILS = ("found", "expected", "where", "hint")
"""What may follow the sentence of an error, in this order."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class CheckpointError(RuntimeError):
    """Base of every refusal; a user can read it without reading the code, on any terminal.

    It is a RuntimeError, because Megatron, ColossalAI and PyTorch raise one where they refuse a checkpoint: programs
    that catch theirs catch this one. What a framework's function raises besides, `patching.replaced_errors` adds.

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
    """A pickle asks for something that reading a checkpoint never needs."""

    _default_hint = "do not load it with other software, which may execute its code; ask its author"


class UnsupportedCheckpointError(CheckpointError):
    """The checkpoint is intact, but of a kind that this package does not read."""


class PackingError(CheckpointError):
    """No packing of the gradient buffers could be found that the proof confirms."""


class ProofError(CheckpointError):
    """A parameter's fp32 master does not round to the weight stored beside it."""


class ModelMismatchError(CheckpointError):
    """The live model and the checkpoint do not describe the same parameters."""


class ResumeRefusedError(CheckpointError):
    """Some rank refused to resume; raised on every rank with the reasons of all."""


class SaveFailedError(CheckpointError):
    """A running job's checkpoint could not be saved; raised on every rank with the reasons of all."""


class UsageError(CheckpointError):
    """An option makes no sense: alone, beside the others, or for this checkpoint."""


class DestinationError(CheckpointError):
    """What is to be written exists already, or the disk refuses it; nothing was published."""


def escaped(text: str, keeps: str = "") -> str:
    """The text with control characters, and what turns writing around, shown as escapes; but for those to keep."""
    return "".join(
        c if c.isprintable() or c in keeps else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def in_words(error: BaseException) -> str:
    """An error of this package as it is, any other with its class."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def with_indefinite_article(noun: str) -> str:
    """The noun after "a" or "an", as it is spoken: a name that begins with a letter read by itself counts, too."""
    alone = noun.startswith(("lm_", "mtp")) or (noun[:2].isupper() and noun[0] in "AEFHILMNORSX")
    return f"{'an' if alone or noun[:1] in 'aeioAEIO' else 'a'} {noun}"


_MOST_TEXT = 300


def shortened(text: str, most: int = _MOST_TEXT) -> str:
    """A text that a stranger may have made long and strange, as a message can show it."""
    return escaped(text if len(text) <= most else f"{text[:most]}...")


_BRACKETS: dict[type, str] = {list: "[]", tuple: "()", set: "{}", frozenset: "{}", deque: "[]", dict: "{}"}
_OPAQUE = (Namespace, SimpleNamespace, bytes, bytearray, slice)
_MOST_ITEMS, _DEEPEST = 8, 3


def shown(value: object, depth: int = 0) -> str:
    """A value in a message, whatever a stranger made of it: the `repr` of lists that refer to lists can be endless."""
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
    """Metadata of a stranger can be anything: what fails on the way through it becomes one clear refusal.

    Raises:
        UnreadableCheckpointError: in place of whatever a value of the wrong type, range or name leads to.
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


def readable(size: int) -> str:
    """A size with three digits and a unit: `1.50 GiB`."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.{max(0, 3 - len(str(int(value))))}f} {_UNITS[unit]}"
