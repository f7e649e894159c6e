"""The sidecar beside a checkpoint, and whether it belongs to it: one answer for all that use it.

A job without this package that writes an iteration again leaves the sidecar of the earlier save beside the new files
(`save`, megatron/core/dist_checkpointing/serialization.py, core_v0.7.0 to 0.19.2, removes nothing). Such a stale
sidecar counts as none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt_ext.errors import CheckpointError, shorten
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.sidecar import FILE_NAME, MOST_BYTES, Sidecar
from mcore_ckpt_ext.storage.budget import OverBudgetError
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.dcp_index import digest_of_index

REWRITTEN = "a job without this package has overwritten the iteration"


@dataclass(frozen=True)
class FoundSidecar:
    """What was found beside a checkpoint.

    Attributes:
        sidecar: what the file holds; None where there is none, or none that can be used.
        problem: why the file that is there is not used; None where it is, or where there is none.
    """

    sidecar: Sidecar | None = None
    problem: str | None = None


def find_sidecar(folder: Path, arguments: JobArguments | None = None, iteration: object = None) -> FoundSidecar:
    """The sidecar of an iteration folder, if it can be read and is not stale.

    Args:
        folder: the iteration folder.
        arguments: those in the checkpoint, if they state the whole layout.
        iteration: the one that the checkpoint itself states.
    """
    # A missing or foreign sidecar only means one source of the order fewer: the packing is checked either way.
    try:
        sidecar = Sidecar.from_json(read_file(folder, FILE_NAME, MOST_BYTES).decode())
    except FileNotFoundError:
        return FoundSidecar()
    except OSError as error:
        return FoundSidecar(problem=error.strerror or str(error))
    except (ValueError, OverBudgetError) as error:
        return FoundSidecar(problem=shorten(str(error)))
    stale = _staleness(sidecar, folder, arguments, iteration)
    return FoundSidecar(problem=f"it is stale, {stale}: {REWRITTEN}") if stale else FoundSidecar(sidecar)


def _staleness(sidecar: Sidecar, folder: Path, arguments: JobArguments | None, iteration: object) -> str | None:
    """In what a sidecar differs from the checkpoint beside it; None where it belongs to it."""
    if sidecar.index and sidecar.index != digest_of_index(folder):
        return "of a save that wrote another index"
    if sidecar.iteration and type(iteration) is int and iteration != sidecar.iteration:
        return f"of iteration {sidecar.iteration} and not {iteration}"
    if arguments is None:
        return None
    try:
        stored = ParallelLayout.from_arguments(arguments).known_sizes()
    except CheckpointError:  # which the reader of the layout reports
        return None
    other = [f"{name} {size} and not {stored[name]}" for name, size in sidecar.layout.items()
             if stored.get(name) not in (None, size)]  # fmt: skip
    return f"of another layout ({', '.join(other)})" if other else None
