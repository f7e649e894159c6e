"""Finds the sidecar of a checkpoint, and checks that it belongs to the checkpoint.

A job without this package that saves an iteration again leaves the sidecar of the earlier save in the folder
(`save`, megatron/core/dist_checkpointing/serialization.py, core_v0.7.0 to 0.19.2, removes nothing). A stale sidecar
is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt_ext.errors import ContentError, shorten
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.sidecar import FILE_NAME, MOST_BYTES, Sidecar
from mcore_ckpt_ext.storage.budget import OverBudgetError
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.dcp_index import FolderIndex

REWRITTEN = "a job without this package has overwritten the iteration"


@dataclass(frozen=True)
class FoundSidecar:
    """The result of looking for a sidecar.

    Attributes:
        sidecar: the content of the file; None if it is missing or cannot be used.
        problem: why an existing file is not used; None if it is used or missing.
    """

    sidecar: Sidecar | None = None
    problem: str | None = None


def find_sidecar(stored: FolderIndex, arguments: JobArguments | None = None, iteration: object = None) -> FoundSidecar:
    """Read the sidecar of an iteration folder, and check that it is not stale.

    Args:
        stored: the index of the iteration folder.
        arguments: the arguments in the checkpoint, if they contain the whole layout.
        iteration: the iteration that the checkpoint records.
    """
    # Without a sidecar there is one source fewer for the order; the packing is checked in any case.
    try:
        sidecar = Sidecar.from_json(read_file(stored.folder, FILE_NAME, MOST_BYTES).decode())
    except FileNotFoundError:
        return FoundSidecar()
    except OSError as error:
        return FoundSidecar(problem=error.strerror or str(error))
    except (ValueError, OverBudgetError) as error:
        return FoundSidecar(problem=shorten(str(error)))
    stale = _staleness(sidecar, stored, arguments, iteration)
    return FoundSidecar(problem=f"it is stale, {stale}: {REWRITTEN}") if stale else FoundSidecar(sidecar)


def _staleness(
    sidecar: Sidecar, stored_index: FolderIndex, arguments: JobArguments | None, iteration: object
) -> str | None:
    """Return how a sidecar differs from its checkpoint; None if it belongs to it."""
    if sidecar.index and sidecar.index != stored_index.digest:
        return "of a save that wrote another index"
    if sidecar.iteration and type(iteration) is int and iteration != sidecar.iteration:
        return f"of iteration {sidecar.iteration} and not {iteration}"
    if arguments is None:
        return None
    try:
        stored = ParallelLayout.from_arguments(arguments).known_sizes()
    except ContentError:  # reported by the reader of the layout
        return None
    other = [
        f"{name} {size} and not {stored[name]}"
        for name, size in sidecar.layout.items()
        if stored.get(name) not in (None, size)
    ]
    return f"of another layout ({', '.join(other)})" if other else None
