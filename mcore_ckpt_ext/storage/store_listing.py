"""The content of a folder of a remote store, listed once for each folder in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

_KEPT_BYTES = 1 << 16
Entries = Mapping[str, Mapping[str, Any]]
"""The store's information about the files and folders in a folder, by name."""


class StoreListing:
    """The content of a folder that is read, as it was when it was first listed.

    Whether a store has a file is a request, and two if it has not. Here each folder is one request, and what is not
    listed is none; a small file is read once.

    Args:
        root: the folder.
        entries_of: requests the content of a folder; it raises FileNotFoundError if there is no such folder.
    """

    def __init__(self, root: PurePosixPath, entries_of: Callable[[PurePosixPath], Entries]) -> None:
        self.root = root
        self._entries_of = entries_of
        self._folders: dict[PurePosixPath, Entries] = {}
        self._contents: dict[PurePosixPath, bytes] = {}

    def covers(self, path: PurePosixPath) -> bool:
        """Return whether a path is that of the folder, or below it."""
        return path == self.root or self.root in path.parents

    def entries(self, folder: PurePosixPath) -> Entries:
        """Return what the folder, or one below it, holds.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        if folder not in self._folders:
            about = None if folder == self.root else self.info(folder)
            is_file = about is not None and about["type"] != "directory"
            self._folders[folder] = {} if is_file else self._entries_of(folder)
        return self._folders[folder]

    def info(self, path: PurePosixPath) -> Mapping[str, Any] | None:
        """Return the store's information about a file or folder; None if only the store has it.

        Raises:
            FileNotFoundError: there is none.
        """
        if path == self.root:
            return {"type": "directory"} if self.entries(path) else None
        entries = self.entries(path.parent)
        if path.name not in entries:
            raise FileNotFoundError(str(path))
        return entries[path.name]

    def content(self, path: PurePosixPath, read: Callable[[], bytes]) -> bytes:
        """Return the bytes of a file below the folder; `read` returns them if they are not known yet.

        Raises:
            FileNotFoundError: there is none.
        """
        about = self.info(path)
        if about is None or int(about.get("size") or 0) > _KEPT_BYTES:
            return read()
        if path not in self._contents:
            self._contents[path] = read()
        return self._contents[path]
