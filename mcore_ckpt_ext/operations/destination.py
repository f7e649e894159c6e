"""Decides where a conversion writes: never into its source, and never over anything but a checkpoint.

Only folders that this tool or Megatron evidently wrote may be replaced: a run folder with a tracker file and one
iteration, or a canonical or Hugging Face folder by its marker file. Any other file in the folder prevents its
replacement, and the error names it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt_ext.errors import ContentError, DestinationError
from mcore_ckpt_ext.formats.auxiliary_files import COMPANION_PATTERN
from mcore_ckpt_ext.formats.backend import sharded_backend
from mcore_ckpt_ext.formats.registry import format_of
from mcore_ckpt_ext.job.loops.bridge import LATEST_TRAIN_STATE
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE, TRACKER_FILE, iteration_number
from mcore_ckpt_ext.storage.file_digests import FILE_NAME as DIGESTS_FILE
from mcore_ckpt_ext.storage.paths import as_path, is_remote

# Megatron's own files next to the iterations (megatron/training: checkpointing.py, training.py, utils.py, 0.7 to 0.19).
_OF_RUNS = (
    re.escape(TRACKER_FILE),
    re.escape(LATEST_TRAIN_STATE),
    r"latest_wandb_artifact_path\.txt",
    r"progress\.txt",
)
# Files of Megatron-Bridge and this tool in an iteration, whatever its format is.
_OF_ITERATIONS = (
    rf"mcore_ckpt_ext\.json|{re.escape(DIGESTS_FILE)}|integrity\.json|run_config\.yaml|train_state\.pt",
    rf"tokenizer/({COMPANION_PATTERN}|[^/]+)",
)
_OF_ALL = re.escape(DIGESTS_FILE)
_SHOWN = 5


@dataclass(frozen=True)
class Destination:
    """The folder to make; `iteration` is the folder in it that will hold the checkpoint, or empty."""

    path: Path
    iteration: str

    def check_replaceable(self, path: Path) -> None:
        """Refuse a folder that must not be replaced; a folder that was moved aside has another path.

        Raises:
            DestinationError: the folder is no checkpoint, or holds other files, too.
        """
        if path.is_symlink() or not path.is_dir():
            raise self._refusal("the destination is not a folder, so it is not replaced", "a file, or a link")
        if not any(path.iterdir()):
            return
        self._check_iterations(path)
        entries = dict(_entries(path))
        try:
            pattern = re.compile("|".join(_expected_files(path)))
        except ContentError as error:
            raise self._refusal("the destination is not a checkpoint, so it is not replaced", str(error)) from error
        if pattern.pattern == "":
            raise self._refusal("the destination is not a checkpoint, so it is not replaced", _some(entries))
        strange = [name for name, ordinary in entries.items() if not (ordinary and pattern.fullmatch(name))]
        if strange:
            raise self._refusal("the destination holds more than a checkpoint, which would be lost", _some(strange))

    def _check_iterations(self, path: Path) -> None:
        folders = [entry.name for entry in path.iterdir() if iteration_number(entry) is not None]
        others = [name for name in folders if name != self.iteration]
        if others:
            raise self._refusal("the destination holds other iterations, which would be lost", _some(others))

    def _refusal(self, message: str, contents: str) -> DestinationError:
        return DestinationError(
            message,
            found=contents,
            expected="only files that this tool or Megatron wrote",
            where=str(self.path),
            hint="choose another folder, or move this one away",
        )


def checked_destination(path: str | os.PathLike[str], sources: Iterable[Path], iteration: str) -> Destination:
    """Return the destination, without links and `..` in its path.

    Args:
        path: the path as the user gives it.
        sources: folders that are read.
        iteration: see `Destination`.

    Raises:
        DestinationError: the path is invalid or a link, lies in a source, or a source lies in it.
    """
    folder = as_path(path)
    is_local = not is_remote(folder)
    if is_local:
        if "\0" in str(folder):
            raise DestinationError("invalid name for a folder", found=repr(str(folder)), hint="choose another name")
        if folder.is_symlink():
            raise DestinationError(
                "the destination is a symbolic link",
                found=f"a link to {folder.readlink()}",
                where=str(folder),
                hint="use the folder that it points to",
            )
        folder = Path(os.path.realpath(folder))
    for source in sources:
        if _is_nested(folder, source):
            raise DestinationError(
                "the destination is inside the source, or would replace it",
                found=f"{source} is read",
                where=str(folder),
                hint="choose a folder outside of it",
            )
    return Destination(folder, iteration)


def _is_nested(first: Path, second: Path) -> bool:
    """Return True if one of two paths is the other or lies in it, under whatever names and links."""
    if is_remote(first) or is_remote(second):
        return first == second or first in second.parents or second in first.parents
    first_path, other = (Path(os.path.realpath(path)) for path in (first, second))
    return any(
        _identity(above) in map(_identity, (below, *below.parents))
        for above, below in ((first_path, other), (other, first_path))
    )


def _identity(path: Path) -> object:
    """Return a folder's identity, independent of its name (bind mounts, letter case), else its path."""
    try:
        status = path.stat()
    except OSError:
        return path
    return status.st_dev, status.st_ino


def _entries(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield everything below a folder except folders: relative paths, and True for a regular file."""
    for above, folders, files in os.walk(folder):
        below = os.path.relpath(above, folder)
        for name in [*files, *(name for name in folders if (Path(above) / name).is_symlink())]:
            status = (Path(above) / name).lstat()
            yield (name if below == "." else f"{below}/{name}"), stat.S_ISREG(status.st_mode)


def _expected_files(folder: Path) -> list[str]:
    """Return patterns of the files that belong to the checkpoint in a folder; empty without a checkpoint.

    Raises:
        CheckpointError: its marker files cannot be read.
    """
    folder_format = format_of(folder)
    if (
        folder_format is not None
        and not folder_format.is_iteration
        and (patterns := folder_format.files_to_replace(folder))
    ):
        return [*patterns, _OF_ALL]
    if (folder / TRACKER_FILE).is_file():
        named = (entry for entry in folder.iterdir() if iteration_number(entry) is not None or entry.name == RELEASE)
        names = [entry.name for entry in named]
        if len(names) != 1:
            return []
        within = format_of(folder / names[0])
        if within is None:
            sharded_backend(folder / names[0])  # raises an error about its content
            return []
        if patterns := within.files_to_replace(folder / names[0]):
            return [*_OF_RUNS, *(f"{re.escape(names[0])}/({pattern})" for pattern in (*patterns, *_OF_ITERATIONS))]
    return []


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:_SHOWN])
