"""Run folders: names of iteration folders, and the tracker file that names the newest one.

Source: `read_metadata` and `get_checkpoint_name`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2.
"""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from mcore_ckpt_ext.errors import UnreadableCheckpointError, join_some
from mcore_ckpt_ext.job.loops.nemo import WEIGHTS
from mcore_ckpt_ext.storage.checked_files import read_start
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE
from mcore_ckpt_ext.storage.paths import entry_names, is_remote, list_once

TRACKER_FILE = "latest_checkpointed_iteration.txt"
NON_PERSISTENT = "non_persistent"
"""The folder within a run folder of checkpoints that the next one replaces (`--non-persistent-ckpt-type global`)."""
RELEASE = "release"
"""The folder of a model without an iteration number, such as a converted one; also the content of its tracker file."""
_ITERATION = re.compile(r"iter_(\d{7,18})", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_SHOWN_CHARACTERS = 40
# Files by which run folders, distributed checkpoints, Hugging Face folders and canonical folders are recognized.
_MARKS = (TRACKER_FILE, METADATA_FILE, "metadata.json", "config.json", "common.json")
_MOST_BYTES = 1 << 12
# Names of DeepSpeed's files (`_get_ckpt_name`, `_get_optimizer_ckpt_name`, `_copy_recovery_script`, and
# `save_checkpoint` for the file of a run folder that names its newest folder, deepspeed/runtime/engine.py).
_OF_DEEPSPEED = re.compile(
    r"zero_to_fp32\.py|mp_rank_\d{2}_model_states\.pt|(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d{2}_\w+_states\.pt"
    r"|layer_\d{2,}-model_\d{2,}-model_states\.pt"
)
_LATEST_OF_DEEPSPEED = "latest"


@dataclass(frozen=True, slots=True)
class Tracker:
    """The content of a tracker file.

    Attributes:
        path: path of the tracker file.
        text: its first 40 characters.
        iteration: the iteration that it names, or None.
    """

    path: Path
    text: str
    iteration: int | None

    @property
    def names_release(self) -> bool:
        """True if the tracker names the folder `release`."""
        return self.text == RELEASE

    @property
    def folder(self) -> Path | None:
        """The folder that the tracker names, which may not exist; None if it names none."""
        if self.names_release:
            return self.path.parent / RELEASE
        return None if self.iteration is None else self.path.parent / iteration_name(self.iteration)


def read_tracker(path: Path) -> Tracker | None:
    """Read a tracker file.

    Returns:
        None if there is no such file.

    Raises:
        OSError: the file cannot be read, or is a link out of its folder.
    """
    try:
        text = read_start(path.parent, path.name, _MOST_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a pipe, for example
            return None
        raise
    return Tracker(path, text[:_SHOWN_CHARACTERS], int(text) if _NUMBER.fullmatch(text) else None)


def newer_non_persistent(run: Path, place: Path | None = None, step: int | None = None) -> Tracker | None:
    """Return the tracker of a run's global non-persistent checkpoints, if a job resumes from one.

    With `--non-persistent-ckpt-type global`, Megatron takes the one that this tracker names unless the persistent one
    is newer (`_load_base_checkpoint`, megatron/training/checkpointing.py, core_v0.8.0 to 0.19.2).

    Args:
        run: the run folder.
        place: the folder of these checkpoints (`--non-persistent-global-ckpt-dir`); by default the one in the run.
        step: the iteration that the user names; None for the newest persistent one.

    Raises:
        OSError: a tracker file cannot be read.
    """
    tracker = read_tracker((place or run / NON_PERSISTENT) / TRACKER_FILE)
    if tracker is None or tracker.iteration is None:
        return tracker  # Megatron interprets any other content
    run_tracker = read_tracker(run / TRACKER_FILE)
    iteration = step or (run_tracker.iteration if run_tracker else None)
    return tracker if iteration is None or tracker.iteration >= iteration else None


def iteration_name(number: int) -> str:
    """Return the name of an iteration's folder."""
    return f"iter_{number:07d}"


def iteration_number(folder: Path | str) -> int | None:
    """Return the iteration number in a folder's name; None if it is not that of an iteration folder."""
    match = _ITERATION.fullmatch(folder if isinstance(folder, str) else folder.name)
    return int(match[1]) if match else None


def iteration_folders(run: Path) -> dict[int, Path]:
    """Return the iteration folders of a run folder by number, the newest first."""
    folders = {number: run / name for name in entry_names(run) if (number := iteration_number(name)) is not None}
    return dict(sorted(folders.items(), reverse=True))


def iteration_folder(path: Path) -> Path:
    """Return the iteration folder that a run folder's tracker names, or `path` if there is no tracker.

    Raises:
        UnreadableCheckpointError: the folder does not exist, or the tracker names none that does.
    """
    path = list_once(path)
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
            "the tracker file names an iteration that does not exist",
            found=_iterations(path),
            expected=tracker.folder.name,
            where=str(tracker.path),
            hint="use the folder of another iteration",
        )
    return tracker.folder


def inner_folder(path: Path) -> Path:
    """Return the inner folder of a NeMo checkpoint, which contains the tensors; otherwise `path`."""
    inner = path / WEIGHTS
    return inner if (inner / METADATA_FILE).exists() and not (path / METADATA_FILE).exists() else path


def check_folder_exists(path: Path) -> None:
    """Check that a local or remote folder exists.

    Raises:
        UnreadableCheckpointError: the folder does not exist.
        StorageError: the remote store cannot be read.
    """
    if not path.is_dir():
        if path.exists():
            raise UnreadableCheckpointError(
                "that is a file, not a folder", where=str(path), hint=f"pass the folder that holds it: {path.parent}"
            )
        raise UnreadableCheckpointError("there is no such folder", where=str(path), hint=_alternative(path))


def _alternative(missing: Path) -> str:
    """Return a hint for a path that does not exist: a folder next to it with a similar name."""
    if is_remote(missing):
        return "check the address"
    there = missing.parent
    with suppress(OSError):
        names = sorted(entry.name for entry in there.iterdir() if entry.is_dir())
        if similar := get_close_matches(missing.name, names, n=1):
            return f"did you mean {there / similar[0]}?"
    return "check the path"


def no_checkpoint_error(path: Path) -> UnreadableCheckpointError:
    """Return the error for a folder without a checkpoint; it names the content and a folder to use."""
    names = sorted(entry.name for entry in path.iterdir())
    iterations = list(iteration_folders(path).values())
    inner = [entry.name for entry in path.glob("*/*")] if _LATEST_OF_DEEPSPEED in names else []
    if any(_OF_DEEPSPEED.fullmatch(name) for name in (*names, *inner)):
        return _deepspeed_refusal(path)
    below = iterations[:1] or [path / name for name in names if _looks_like_checkpoint(path / name)]
    return UnreadableCheckpointError(
        "there is no checkpoint in this folder",
        found=_iterations(path) if iterations else join_some(names) or "nothing, it is empty",
        expected=f"a run folder with its {TRACKER_FILE}, an iteration folder, a Hugging Face or a canonical folder",
        where=str(path),
        hint=f"use {below[0]}" if len(below) == 1 else "check the path",
    )


def _deepspeed_refusal(path: Path) -> UnreadableCheckpointError:
    return UnreadableCheckpointError(
        "DeepSpeed wrote this folder, and its checkpoints are not read",
        where=str(path),
        expected="a checkpoint of Megatron or ColossalAI, or a Hugging Face folder",
        hint="zero_to_fp32.py, which DeepSpeed puts into the folder, writes the weights as safetensors; with "
        "the model's config.json beside them they are a Hugging Face folder",
    )


def _looks_like_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a file that all checkpoints of a format have, or an iteration folder."""
    return folder.is_dir() and (any((folder / name).exists() for name in _MARKS) or bool(iteration_folders(folder)))


def _iterations(run: Path) -> str:
    return join_some([folder.name for folder in iteration_folders(run).values()]) or "no iteration at all"
