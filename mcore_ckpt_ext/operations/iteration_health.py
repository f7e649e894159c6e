"""Finds complete iterations of a run by the quick checks of `verify`, so that a resume may take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt_ext.errors import ContentError, StorageError, UnsupportedCheckpointError, unreadable_file
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE, iteration_folders, iteration_name, read_tracker
from mcore_ckpt_ext.storage.dcp_index import FolderIndex


@dataclass(frozen=True)
class IterationHealth:
    """The state of the checkpoint that a resume would take.

    Attributes:
        wanted: the iteration that the tracker, or the user, names, in words.
        problems: its problems; empty if there are none.
        newest_complete: the newest complete iteration of the run, or None; searched only if the wanted one is not
            complete.
        unfinished: incomplete iterations after the wanted one.
        has_tracker: True if the tracker names an iteration.
    """

    wanted: str
    problems: tuple[str, ...]
    newest_complete: int | None
    unfinished: tuple[int, ...]
    has_tracker: bool = True


def iteration_health_of(
    run: Path, step: int | None = None, index: FolderIndex | None = None, *, full: bool = False
) -> IterationHealth | None:
    """Assess the checkpoint that a resume from a run folder would take.

    Args:
        run: the run folder.
        step: the iteration that the user names; None for the tracker's.
        index: the index of that iteration, if it has been used before.
        full: read all bytes of the wanted iteration, and of others that may take its place.

    Returns:
        The assessment; None without a tracker.
    """
    tracker = read_tracker(run / TRACKER_FILE)
    if step is None and (tracker is None or tracker.names_release):
        return None
    iterations = {number: path for number, path in iteration_folders(run).items() if path.is_dir()}  # newest first
    iteration = tracker.iteration if step is None and tracker else step
    if iteration is None:
        problem = f"{run / TRACKER_FILE} names no iteration, it holds {tracker.text if tracker else ''!r}"
        return IterationHealth(
            "what the tracker names", (problem,), _newest_complete(iterations, full=full), (), has_tracker=False
        )
    folder = iterations.get(iteration, run / iteration_name(iteration))
    stored = index if index is not None and index.is_of(folder) else FolderIndex(folder)
    problems = problems_of(folder, stored, full=full)
    later = tuple(number for number, newer in iterations.items() if number > iteration and not _is_complete(newer))
    others = {number: path for number, path in iterations.items() if number != iteration}
    return IterationHealth(
        f"iteration {iteration}", problems, _newest_complete(others, full=full) if problems else None, later
    )


def problems_of(folder: Path, index: FolderIndex | None = None, *, full: bool = False) -> tuple[str, ...]:
    """Return the problems of an iteration, by its files and its metadata; empty if there are none.

    Args:
        folder: the iteration folder.
        index: its index, if it has been used before.
        full: whether to read all of its bytes, too.

    Raises:
        StorageError: its files cannot be read, so that nothing is known about them.
    """
    try:
        verification = verify(folder, quick=not full, index=index)
    except UnsupportedCheckpointError:  # unsupported is not damaged
        return ()
    except ContentError as error:
        return (str(error),)
    except OSError as error:
        raise unreadable_file("a file of the checkpoint cannot be read", error, error.filename or folder) from error
    return tuple(f"{finding.where}: {finding.what}" for finding in verification.findings if finding.severity == "error")


def _newest_complete(iterations: dict[int, Path], *, full: bool) -> int | None:
    return next((number for number, folder in iterations.items() if _is_complete(folder, full=full)), None)


def _is_complete(folder: Path, *, full: bool = False) -> bool:
    try:
        return not problems_of(folder, full=full)
    except StorageError:
        return False
