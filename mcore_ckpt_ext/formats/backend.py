"""`metadata.json`, the last file that Megatron writes, names the format of an iteration's arrays.

Source: `CheckpointingConfig` (megatron/core/dist_checkpointing/core.py, core_v0.7.0 to 0.19.2).
"""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt_ext.errors import UnreadableCheckpointError, unreadable_file
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.json_text import parse_json

CONFIG_FILE = "metadata.json"


def sharded_backend(folder: Path) -> str:
    """Return Megatron's name of the format of the arrays in an iteration folder.

    Raises:
        UnreadableCheckpointError: the folder contains no finished checkpoint.
    """
    path = folder / CONFIG_FILE
    try:
        return str(parse_json(read_file(folder, CONFIG_FILE))["sharded_backend"])
    except PermissionError as error:
        raise unreadable_file("no permission to read the checkpoint", error, path) from error
    except OSError as error:
        raise UnreadableCheckpointError(
            "this is not a finished torch_dist checkpoint: Megatron writes metadata.json last",
            found=error.strerror,
            where=str(path),
            hint="name a run folder or an iter_XXXXXXX folder; if the save was interrupted, use another iteration",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableCheckpointError("metadata.json is damaged", found=str(error), where=str(path)) from error


def is_finished(folder: Path, backend: str) -> bool:
    """Return whether an iteration folder is a finished checkpoint in the format `backend`.

    `backend` is Megatron's name of the format.
    """
    try:
        return sharded_backend(folder) == backend
    except UnreadableCheckpointError:
        return False
