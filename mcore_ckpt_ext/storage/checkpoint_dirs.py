"""Run folders: the names of iterations, and the tracker file that names the newest one.

Source: `read_metadata` and `get_checkpoint_name`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt_ext.errors import UnreadableCheckpointError, join_some
from mcore_ckpt_ext.job.loops.nemo import WEIGHTS
from mcore_ckpt_ext.storage.checked_files import read_start
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE

TRACKER_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""The name of the folder of a model that no iteration of a job made, and what the tracker says where it is meant."""
_ITERATION = re.compile(r"iter_(\d{7,18})", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_SHOWN = 40
# Of run folders, distributed checkpoints, Hugging Face folders and canonical ones.
_MARKS = (TRACKER_FILE, METADATA_FILE, "metadata.json", "config.json", "common.json")
_MOST_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class Tracker:
    """The content of a tracker file.

    Attributes:
        path: the file.
        text: its first characters.
        iteration: the one that it names, or None.
    """

    path: Path
    text: str
    iteration: int | None

    @property
    def names_release(self) -> bool:
        """Whether the tracker names the folder `release`."""
        return self.text == RELEASE

    @property
    def folder(self) -> Path | None:
        """The folder that it names, whether it exists or not; None where it names none."""
        if self.names_release:
            return self.path.parent / RELEASE
        return None if self.iteration is None else self.path.parent / iteration_name(self.iteration)


def read_tracker(path: Path) -> Tracker | None:
    """Read a tracker file; None if there is none.

    Raises:
        OSError: it cannot be read, or is a link that leads elsewhere.
    """
    try:
        text = read_start(path.parent, path.name, _MOST_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a pipe, say
            return None
        raise
    return Tracker(path, text[:_SHOWN], int(text) if _NUMBER.fullmatch(text) else None)


def iteration_name(number: int) -> str:
    """The name of an iteration's folder."""
    return f"iter_{number:07d}"


def iteration_number(folder: Path) -> int | None:
    """Which iteration a folder is named after; None for every other name."""
    match = _ITERATION.fullmatch(folder.name)
    return int(match[1]) if match else None


def iteration_folders(run: Path) -> dict[int, Path]:
    """A run folder's iteration folders, by number, newest first."""
    found = {number: path for path in run.iterdir() if (number := iteration_number(path)) is not None}
    return dict(sorted(found.items(), reverse=True))


def iteration_folder(path: Path) -> Path:
    """The iteration folder that a run folder's tracker names, or `path` itself where it has no tracker.

    Raises:
        UnreadableCheckpointError: there is no such folder, or its tracker names none.
    """
    check_folder_exists(path)
    tracker = read_tracker(path / TRACKER_FILE)
    if tracker is None:
        return inner_folder(path)
    if tracker.folder is None:
        raise UnreadableCheckpointError(
            "the tracker file names no iteration", found=repr(tracker.text), where=str(tracker.path)
        )
    if not tracker.folder.is_dir():
        raise UnreadableCheckpointError(
            "the tracker file names an iteration that does not exist", found=_iterations(path),
            expected=tracker.folder.name, where=str(tracker.path), hint="use the folder of another iteration",
        )  # fmt: skip
    return tracker.folder


def inner_folder(path: Path) -> Path:
    """The folder inside a NeMo checkpoint that contains it; otherwise `path` itself."""
    inner = path / WEIGHTS
    return inner if (inner / METADATA_FILE).exists() and not (path / METADATA_FILE).exists() else path


def check_folder_exists(path: Path) -> None:
    """Check that there is a folder, here or in a remote store.

    Raises:
        UnreadableCheckpointError: there is none, or the store does not answer.
    """
    try:
        there = path.is_dir()
    except OSError:
        raise
    except Exception as error:
        # The libraries of remote stores have their own, of a missing password for example.
        raise UnreadableCheckpointError(
            "the remote store cannot be read", found=f"{type(error).__name__}: {error}", where=str(path),
            hint="check the address, and that the store's library finds your credentials (fsspec, s3fs, gcsfs, adlfs)",
        ) from error  # fmt: skip
    if not there:
        what = "that is a file, not a folder" if path.exists() else "there is no such folder"
        raise UnreadableCheckpointError(what, where=str(path), hint="check the path")


def no_checkpoint(path: Path) -> UnreadableCheckpointError:
    """Return the refusal of a folder in which nothing is a checkpoint, with what is in it, and where to look."""
    names = sorted(entry.name for entry in path.iterdir())
    iterations = list(iteration_folders(path).values())
    below = iterations[:1] or [path / name for name in names if _looks_like_checkpoint(path / name)]
    return UnreadableCheckpointError(
        "there is no checkpoint in this folder",
        found=_iterations(path) if iterations else join_some(names) or "nothing, it is empty",
        expected=f"a run folder with its {TRACKER_FILE}, an iteration folder, a Hugging Face or a canonical folder",
        where=str(path),
        hint=f"use {below[0]}" if len(below) == 1 else "check the path",
    )


def _looks_like_checkpoint(folder: Path) -> bool:
    """Whether a folder has one of the files that every checkpoint of its format has, or an iteration."""
    return folder.is_dir() and (any((folder / name).exists() for name in _MARKS) or bool(iteration_folders(folder)))


def _iterations(run: Path) -> str:
    return join_some([folder.name for folder in iteration_folders(run).values()]) or "no iteration at all"
