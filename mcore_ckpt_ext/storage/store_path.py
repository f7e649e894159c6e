"""Paths in remote stores (`s3://bucket/run`), with methods of `pathlib.Path`, through fsspec.

Some of fsspec's methods hide errors, so that a store that does not answer looks like an empty one (`exists`, `isfile`,
`isdir` and `walk`, fsspec/spec.py, 2026.9). They are not used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import StorageError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.storage.multipart import upload_options
from mcore_ckpt_ext.storage.store_errors import raise_unless_missing, translate_errors
from mcore_ckpt_ext.storage.store_file import StoreFile
from mcore_ckpt_ext.storage.store_listing import Entries, StoreListing

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class StoreStatus:
    """Size of a file in bytes, and time of its last modification in seconds since 1970, or 0."""

    st_size: int
    st_mtime: float


class StorePath:
    """A path in a remote store. All methods that use the store raise FileNotFoundError or StorageError.

    Args:
        files: the store's file system of fsspec.
        root: how all paths begin for this file system, such as the empty text for `bucket/run`.
        scheme: how they begin for people, such as `s3://`.
        below: the rest of the path.
        listing: what a folder holds that contains the path; questions about it make no request.
    """

    def __init__(
        self, files: Any, root: str, scheme: str, below: PurePosixPath, listing: StoreListing | None = None
    ) -> None:
        self.files = files
        self._root = root
        self._scheme = scheme
        self._below = below
        self._listing = listing if listing is not None and listing.covers(below) else None

    @classmethod
    def of(cls, address: str) -> StorePath:
        """Return the path of an address.

        Raises:
            UnsupportedCheckpointError: the library for that store is not installed.
            StorageError: the library cannot be used, for example without credentials.
        """
        with translate_errors(address):
            try:
                from fsspec.core import url_to_fs

                files, key = url_to_fs(address)
            except (ImportError, ValueError) as error:
                raise UnsupportedCheckpointError(
                    "this remote store needs a library that is not installed",
                    found=str(error),
                    where=address,
                    hint="pip install fsspec, and its library for the store (s3fs, gcsfs, adlfs, ...)",
                ) from error
        return cls._join(files, key, address)

    @classmethod
    def from_file_system(cls, files: Any, key: str) -> StorePath:
        """Return the path of a file or folder of a file system of fsspec."""
        return cls._join(files, key, files.unstrip_protocol(key))

    @classmethod
    def _join(cls, files: Any, key: str, address: str) -> StorePath:
        """Return a path by its name for the store and its address, which end alike."""
        names = key.rstrip("/").split("/")
        shown = address.rstrip("/").split("/")
        common: list[str] = []
        while names and shown and names[-1] == shown[-1] != "":
            common.insert(0, names.pop())
            shown.pop()
        root, scheme = ("/".join([*parts, ""]) for parts in (names, shown))
        return cls(files, root, scheme, PurePosixPath(*common))

    def _with_below(self, below: PurePosixPath) -> StorePath:
        return StorePath(self.files, self._root, self._scheme, below, self._listing)

    def list_once(self) -> StorePath:
        """Return this folder for reading it as it is now; each folder in it is listed once."""
        if self._listing is not None:
            return self
        self.files.invalidate_cache(self.key)
        listing = StoreListing(self._below, lambda folder: self._with_below(folder)._request_entries())
        return StorePath(self.files, self._root, self._scheme, self._below, listing)

    @property
    def key(self) -> str:
        """The path as the store's file system spells it."""
        return self._root + ("" if self._below == PurePosixPath() else str(self._below))

    @override
    def __str__(self) -> str:
        return self._scheme + ("" if self._below == PurePosixPath() else str(self._below))

    @override
    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and (self.files, self.key) == (other.files, other.key)

    @override
    def __hash__(self) -> int:
        return hash(self.key)

    def __lt__(self, other: StorePath) -> bool:
        return self.key < other.key

    def __truediv__(self, name: str | PurePosixPath) -> StorePath:
        return self._with_below(self._below / name)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._below.name

    @property
    def stem(self) -> str:
        """The last part of the path, without its suffix."""
        return self._below.stem

    @property
    def suffix(self) -> str:
        """The suffix of the last part."""
        return self._below.suffix

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the path, from the store's top folder on."""
        return self._below.parts

    @property
    def parent(self) -> StorePath:
        """The folder that contains it."""
        return self._with_below(self._below.parent)

    @property
    def parents(self) -> tuple[StorePath, ...]:
        """All folders that contain it, the nearest first."""
        return tuple(map(self._with_below, self._below.parents))

    def with_name(self, name: str) -> StorePath:
        """Return the path of another name in the same folder."""
        return self._with_below(self._below.with_name(name))

    def absolute(self) -> StorePath:
        """Return this path."""
        return self

    def as_posix(self) -> str:
        """Return the address."""
        return str(self)

    def relative_to(self, folder: StorePath) -> PurePosixPath:
        """Return the path in a folder that contains it."""
        return self._below.relative_to(folder._below)

    def is_symlink(self) -> bool:
        """Return False: stores have no links."""
        return False

    def _info(self) -> Mapping[str, Any]:
        with translate_errors(self):
            if self._listing is not None and (about := self._listing.info(self._below)) is not None:
                return about
            info: Mapping[str, Any] = self.files.info(self.key)
        return info

    def _kind(self) -> str | None:
        try:
            return str(self._info()["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def exists(self) -> bool:
        """Return whether there is a file or a folder."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Return whether there is a file."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Return whether there is a folder."""
        return self._kind() == "directory"

    def stat(self) -> StoreStatus:
        """Return size and time of a file."""
        return _status(self._info())

    def _request_entries(self) -> Entries:
        with translate_errors(self):
            listed = self.files.ls(self.key, detail=True)
        names = ((str(about["name"]).rstrip("/"), about) for about in listed)
        return {name.rpartition("/")[2]: about for name, about in names if name != self.key}

    def _entries(self) -> list[tuple[StorePath, bool]]:
        """Return what a folder holds, each with True for a folder."""
        with translate_errors(self):
            entries = self._request_entries() if self._listing is None else self._listing.entries(self._below)
        return [(self / name, about["type"] == "directory") for name, about in entries.items()]

    def iterdir(self) -> Iterator[StorePath]:
        """Yield the files and folders of a folder."""
        yield from (path for path, _ in self._entries())

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """Yield the files and folders that match a pattern, part by part; `**` is not supported."""
        first, _, rest = pattern.partition("/")
        try:
            entries = self._entries()
        except (FileNotFoundError, NotADirectoryError):
            return
        for path, is_folder in entries:
            if fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest and is_folder else () if rest else (path,)

    def rglob(self, pattern: str) -> Iterator[StorePath]:
        """Yield all files below a folder whose names match a pattern."""
        yield from (self / name for name in self.files_below() if fnmatchcase(name.rpartition("/")[2], pattern))

    def find(self) -> dict[str, Mapping[str, Any]]:
        """Return the store's information about each file below a folder, by its path in the folder."""
        # A library that lists a store by itself reports errors; fsspec's own walk omits what it cannot list.
        from fsspec.asyn import AsyncFileSystem

        lists_itself = getattr(type(self.files), "_find", AsyncFileSystem._find) is not AsyncFileSystem._find
        with translate_errors(self):
            options = {} if lists_itself else {"on_error": raise_unless_missing}
            listed = self.files.find(self.key, detail=True, **options)
        prefix = f"{self.key}/"
        return {name.removeprefix(prefix): about for name, about in sorted(listed.items()) if name.startswith(prefix)}

    def files_below(self) -> dict[str, StoreStatus]:
        """Return size and time of each file below a folder, by its path in the folder."""
        entries = {} if self._listing is None else self._listing.entries(self._below)
        is_flat = entries and all(about["type"] == "file" for about in entries.values())
        return {name: _status(about) for name, about in (entries if is_flat else self.find()).items()}

    def open(self, mode: str = "rb") -> StoreFile:
        """Open a file for reading its bytes."""
        if mode != "rb":
            raise ValueError(f"files of stores are opened with mode 'rb', not {mode!r}")
        with translate_errors(self):
            return StoreFile(self.files.open(self.key, "rb"), str(self))

    def read_range(self, start: int, stop: int) -> bytes:
        """Return bytes `[start, stop)` of a file, by one request."""
        with translate_errors(self):
            data: bytes = self.files.cat_file(self.key, start=start, end=stop)
        if len(data) != stop - start:
            raise StorageError(
                "the remote store returned another number of bytes than was requested",
                found=quantity(len(data), "byte"),
                expected=f"{quantity(stop - start, 'byte')} from byte {start:,}",
                where=str(self),
                hint="try again; if it fails again, the file changes while it is read",
            )
        return data

    def read_bytes(self) -> bytes:
        """Return the bytes of a file."""
        with translate_errors(self):
            return (
                self._request_bytes()
                if self._listing is None
                else self._listing.content(self._below, self._request_bytes)
            )

    def _request_bytes(self) -> bytes:
        data: bytes = self.files.cat_file(self.key)
        return data

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the text of a file."""
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, data: bytes) -> None:
        """Write a file in one request, so that a reader sees the former content or the new one."""
        with translate_errors(self, "written"):
            self.files.pipe_file(self.key, data)

    def write_text(self, text: str) -> None:
        """Write a text file; see `write_bytes`."""
        self.write_bytes(text.encode("utf-8", "surrogateescape"))

    def upload(self, local: Path) -> None:
        """Write a file with the content of a local one, in bounded memory; see `multipart`."""
        with translate_errors(self, "written"):
            options = upload_options(self.files.put_file, local.stat().st_size)
            self.files.put_file(str(local), self.key, **options)

    def make_folder(self) -> None:
        """Create the folder and those that contain it, in stores that have folders."""
        with translate_errors(self, "written"):
            self.files.makedirs(self.key, exist_ok=True)

    def remove(self, *, recursive: bool = False) -> None:
        """Remove a file, or a folder with its content."""
        with translate_errors(self, "written"):
            self.files.rm(self.key, recursive=recursive)

    def forget_cache(self) -> None:
        """Forget listings, which may be older than the writes of other processes."""
        self.files.invalidate_cache()


def _status(about: Mapping[str, Any]) -> StoreStatus:
    time = next((about[name] for name in _TIMES if about.get(name) is not None), 0.0)
    seconds = time.timestamp() if isinstance(time, datetime) else time
    return StoreStatus(int(about.get("size") or 0), float(seconds) if isinstance(seconds, (int, float)) else 0.0)
