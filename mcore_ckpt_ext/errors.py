"""The errors of this package: each says what was found, what was expected, where, and what helps."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(Exception):
    """Base of every refusal; a user can read it without reading the code.

    Args:
        what: one sentence, what is wrong.
        found: what the checkpoint, the disk or the live model holds.
        expected: what had to be there.
        where: file, tensor, rank.
        helps: which flag or step leads out.
    """

    def __init__(
        self,
        what: str,
        *,
        found: object = None,
        expected: object = None,
        where: str | None = None,
        helps: str | None = None,
    ) -> None:
        parts = [what]
        for label, value in (("found", found), ("expected", expected), ("where", where), ("what helps", helps)):
            if value is not None:
                parts.append(f"{label}: {value}")
        super().__init__("; ".join(parts))


class UnreadableCheckpointError(CheckpointError):
    """A file is missing, truncated, damaged, or not what its metadata says."""


class UnsafePickleError(CheckpointError):
    """A pickle asks for something that reading a checkpoint never needs."""


class UnsupportedCheckpointError(CheckpointError):
    """The checkpoint is intact, but of a kind that this package does not read."""


class LayoutError(CheckpointError):
    """No layout of the gradient buffers could be found that the proof confirms."""


class ProofError(CheckpointError):
    """A parameter's fp32 master does not round to the weight stored beside it."""


class ModelMismatchError(CheckpointError):
    """The live model and the checkpoint do not describe the same parameters."""


class ResumeRefusedError(CheckpointError):
    """Some rank refused to resume; raised on every rank with the reasons of all."""


class SaveFailedError(CheckpointError):
    """A running job's checkpoint could not be saved; raised on every rank with the reasons of all."""


class DestinationError(CheckpointError):
    """What is to be written exists already, or the disk refuses it; nothing was published."""


@contextmanager
def interpreting(where: object) -> Iterator[None]:
    """Metadata of a stranger can be anything: what fails on the way through it becomes one clear refusal.

    Raises:
        UnreadableCheckpointError: in place of whatever a value of the wrong type, range or name leads to.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise UnreadableCheckpointError(
            "the checkpoint's metadata makes no sense here: it is damaged, or of a kind that is not known",
            found=f"{type(error).__name__}: {error} ({at.name}, line {at.lineno})",
            where=str(where),
            helps="run mcore-ckpt verify, and use another iteration; if that one is whole, please report this",
        ) from error
