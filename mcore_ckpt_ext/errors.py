"""The errors of this package: a sentence, the value found, the value expected, the place, and a hint."""

from __future__ import annotations

import errno
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

    It is a RuntimeError because Megatron, ColossalAI and PyTorch raise a RuntimeError when they refuse a checkpoint:
    programs that catch their error also catch this one. `patching.replaced_errors` adds other base classes, namely
    the errors that the original of a patched function raises.

    Args:
        message: one sentence that describes the problem.
        found: the value in the checkpoint, on disk or in the live model.
        expected: the value that is required there.
        where: file, tensor or rank.
        hint: a command, flag or step that solves the problem; by default the hint of the error's class.

    Attributes:
        message: the sentence alone.
        details: the texts of `found`, `expected`, `where` and `hint`; arguments that were None are absent.

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
        self.message = escape(message, keeps="\n\t")  # PyTorch's own messages contain both
        self.details = {
            label: escape(value if isinstance(value, str) else format_value(value))
            for label, value in values
            if value is not None
        }
        super().__init__("; ".join([self.message, *(f"{label}: {text}" for label, text in self.details.items())]))
        self.found = found


class ContentError(CheckpointError):
    """Base class of the errors whose reason lies in the content of a checkpoint, or in the live model."""


class UnreadableCheckpointError(ContentError):
    """A file is missing, truncated or damaged, or contradicts its metadata."""

    _default_hint = "use another copy, or another iteration where there is one"


class UnsafePickleError(ContentError):
    """A pickle requests a class or function that no checkpoint needs."""

    _default_hint = "do not load it with other software, which may execute its code; ask its author"


class UnsupportedCheckpointError(ContentError):
    """The checkpoint is intact, but this package does not read its kind."""


class PackingError(ContentError):
    """No packing of the gradient buffers could be verified."""


class ProofError(ContentError):
    """A parameter's fp32 master does not round to the weight in the same checkpoint."""


class ModelMismatchError(ContentError):
    """The live model and the checkpoint do not describe the same parameters."""


class ResumeRefusedError(CheckpointError):
    """A rank refused to resume; raised on every rank with the reasons of all ranks."""


class SaveFailedError(CheckpointError):
    """A running job could not save a checkpoint; raised on every rank with the reasons of all ranks."""


class StorageError(CheckpointError):
    """A disk, a file system or a store does not let a file be read; nothing is said of its content."""


class LostProcessError(CheckpointError):
    """Another process that shares the command has ended; nothing is known of what both looked at."""


class UsageError(CheckpointError):
    """An option is invalid: by itself, combined with the others, or for this checkpoint."""


class UnknownNameError(UsageError, KeyError):
    """A program requests a kind or a tensor that an open checkpoint does not have; also a KeyError."""

    def __str__(self) -> str:
        return RuntimeError.__str__(self)  # that of KeyError is the `repr` of the text


class DestinationError(CheckpointError):
    """The destination exists already or cannot be written; it was left unchanged."""


def escape(text: str, keeps: str = "") -> str:
    """Escape control characters and those that reverse the direction of text, except those in `keeps`."""
    return "".join(
        c if c.isprintable() or c in keeps else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def format_error(error: BaseException) -> str:
    """Return the message of an error, preceded by its class unless it is a `CheckpointError`."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def with_indefinite_article(noun: str) -> str:
    """Put "a" or "an" before a noun, by its pronunciation: "an MTP layer"."""
    alone = noun.startswith(("lm_", "mtp")) or (noun[:2].isupper() and noun[0] in "AEFHILMNORSX")
    return f"{'an' if alone or noun[:1] in 'aeioAEIO' else 'a'} {noun}"


_MOST_TEXT = 300


def shorten(text: str, most: int = _MOST_TEXT) -> str:
    """Escape and shorten an untrusted text for a message."""
    return escape(text if len(text) <= most else f"{text[:most]}...")


_BRACKETS: dict[type, str] = {list: "[]", tuple: "()", set: "{}", frozenset: "{}", deque: "[]", dict: "{}"}
_OPAQUE = (Namespace, SimpleNamespace, bytes, bytearray, slice)
_MOST_ITEMS = 8
_DEEPEST = 3


def format_value(value: object, depth: int = 0) -> str:
    """Format an untrusted value for a message; unlike `repr`, the result is always short."""
    if isinstance(value, str):
        return shorten(repr(value[:_MOST_TEXT]) if depth else value)
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length():,} bits"
    if isinstance(value, _OPAQUE):
        return f"a {type(value).__name__}"
    if type(value).__str__ is object.__str__:
        for kind, brackets in _BRACKETS.items():
            if isinstance(value, kind):
                return brackets[0] + (_items(value, depth + 1) if depth < _DEEPEST else "...") + brackets[1]
    return shorten(str(value))


def _items(value: Any, depth: int) -> str:
    first = list(islice(value, _MOST_ITEMS))
    texts = [format_value(item, depth) for item in first]
    if isinstance(value, dict):
        texts = [f"{text}: {format_value(value[key], depth)}" for key, text in zip(first, texts, strict=True)]
    more = len(value) - len(first)
    trailing_comma = "," if type(value) is tuple and len(value) == 1 else ""
    return ", ".join(texts) + trailing_comma + (f" and {more:,} more" if more else "")


@contextmanager
def reraise_as_unreadable(where: object) -> Iterator[None]:
    """Turn any error that untrusted metadata causes into an UnreadableCheckpointError.

    Args:
        where: the file or folder that holds the metadata.

    Raises:
        UnreadableCheckpointError: a value of the metadata has a wrong type, range or name.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise UnreadableCheckpointError(
            "invalid metadata in the checkpoint: it is damaged, or of an unknown kind",
            found=f"{shorten(f'{type(error).__name__}: {error}')} ({at.name}, line {at.lineno})",
            where=str(where),
            hint="use another iteration, or find the damage: mcore-ckpt verify PATH; if it finds no error, please "
            "report this",
        ) from error


INTERRUPTED = "the save was interrupted or the copy is incomplete: use another iteration"
"""The hint for a checkpoint of which a part is missing."""


class RefusedFileError(OSError):
    """A file that is not read for what it is: a link out of the folder, a device, or far too large."""


_ANSWERS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""Error numbers that state what lies at a path, and not that it cannot be read."""
_HINTS: dict[int, str] = {
    errno.ELOOP: "a link leads to itself: replace it by the file that it stands for (ls -l shows where it leads)",
    errno.ESTALE: "the file server has lost the file: mount the file system again, and try again",
    errno.ENOSPC: "free some space; TMPDIR names another folder for temporary files",
    errno.EDQUOT: "free some space; TMPDIR names another folder for temporary files",
    errno.EROFS: "choose a place that you may write to; TMPDIR names another folder for temporary files",
    errno.EMFILE: "raise the limit of open files (ulimit -n), and try again",
    errno.ENFILE: "close other programs, since the machine has too many open files, and try again",
    errno.ENOMEM: "close other programs, since the machine is out of memory, and try again",
}
_DISK_HINT = "try again; if it fails again, check the disk and the file system (dmesg), or use another copy"


def is_answer(error: OSError) -> bool:
    """Return whether an error states what lies at a path, and so something of a checkpoint's content."""
    return isinstance(error, RefusedFileError) or error.errno in _ANSWERS


def io_hint(error: OSError) -> str:
    """Return the hint for a file of a checkpoint that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        return INTERRUPTED
    if is_answer(error):
        return "replace it by the file itself, or use another iteration"
    if isinstance(error, PermissionError):
        return "read it as a user with permission, or ask its owner for permission (chmod)"
    return _HINTS.get(error.errno or 0, _DISK_HINT)


def unreadable_file(message: str, error: OSError, path: object) -> UnreadableCheckpointError | StorageError:
    """Return the error for a file that cannot be read: about the content only if `error` is, too."""
    kind = UnreadableCheckpointError if is_answer(error) else StorageError
    return kind(message, found=error.strerror or str(error), where=str(path), hint=io_hint(error))


def quantity(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, or noun and verb: `1 tensor`, `2,000 tensors`, `1 file is`.

    Args:
        number: how many there are.
        singular: the words for one.
        plural: those for several, if that is not `singular` and an s.
    """
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def join_some(names: Sequence[str], limit: int = 4) -> str:
    """Join the first names and the number of the others: `a, b, c, d and 12 more`."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more:,} more" if more > 0 else "")


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
    return join_some(
        [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))],
        limit=8,
    )


def format_bytes(size: int) -> str:
    """Format a size in bytes with three digits and a unit: `1.50 GiB`."""
    value = float(size)
    unit = 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value = value / 1024
        unit = unit + 1
    return f"{size} B" if unit == 0 else f"{value:.{max(0, 3 - len(str(int(value))))}f} {_UNITS[unit]}"
