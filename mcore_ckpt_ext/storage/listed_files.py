"""Files that an untrusted index lists: they have to be in the folder of the index."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt_ext.errors import UnreadableCheckpointError, join_some, shorten

_LONGEST_NAME = 255  # bytes of a file name on Linux (NAME_MAX)


def is_file_name(text: str) -> bool:
    """Return whether a text can name a file in the folder of an index."""
    is_short = len(text.encode("utf-8", "surrogatepass")) <= _LONGEST_NAME
    return text not in ("", ".", "..") and not {"/", "\0"} & set(text) and is_short


def check_listed(index: Path, files: Iterable[str], incomplete: str) -> None:
    """Check that the files that an index lists are in its folder.

    Args:
        index: the index.
        files: the names that it lists.
        incomplete: the hint if files are missing.

    Raises:
        UnreadableCheckpointError: a file is missing, or is not one of this folder.
    """
    listed = list(files)
    outside = [file for file in listed if not is_file_name(file)]
    absent = [file for file in listed if file not in outside and not (index.parent / file).exists()]
    if outside or absent:
        raise UnreadableCheckpointError(
            "the index lists files that do not exist in its folder",
            found=join_some([shorten(file, 60) for file in outside or absent]),
            where=str(index),
            hint="do not trust it: an index lists files of its own folder" if outside else incomplete,
        )
