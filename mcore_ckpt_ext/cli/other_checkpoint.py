"""Names the checkpoint that a job would take in place of the one that a command looks at."""

from __future__ import annotations

from contextlib import suppress

from mcore_ckpt_ext.cli.output import message
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folders, newer_non_persistent
from mcore_ckpt_ext.storage.paths import as_path


def mention_non_persistent(path: str) -> None:
    """Say on stderr that a run folder has a non-persistent checkpoint that is at least as new.

    Which of them a job takes depends on its `--non-persistent-ckpt-type`, so that a command looks at the persistent one
    unless it is given the folder of the other.
    """
    with suppress(OSError, ValueError, CheckpointError):  # the command reports what is wrong with the path
        run = as_path(path)
        tracker = newer_non_persistent(run)
        folder = None if tracker is None else tracker.folder
        if folder is not None and folder.is_dir() and iteration_folders(run):
            message(
                f"the newest persistent checkpoint of {path} is used; with --non-persistent-ckpt-type global, a job "
                f"resumes from {folder}: to look at that, pass its path"
            )
