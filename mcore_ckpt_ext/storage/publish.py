"""Publishing a folder: written beside its destination under another name, and renamed when it is whole.

A kill at any moment leaves what was there before, or the new folder; what is unfinished bears `.partial-` in its name.
The unfinished folder is this user's own (mode 0700) and never another's, one for each destination, and locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

from mcore_ckpt_ext.errors import DestinationError
from mcore_ckpt_ext.storage.atomic_files import cannot_write
from mcore_ckpt_ext.storage.folder import Folder, exchange, move_new

_CONTENT, _REPLACED, _LOCK, _WORK, _JOURNAL = "content", "replaced", "lock", "work", "journal"
_NAME_BYTES = 255  # NAME_MAX of Linux
_WORK_LIMIT = 1 << 12
_JOURNAL_LIMIT = 1 << 30
_MINE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

CheckReplaceable = Callable[[Path], None]
"""Raises DestinationError unless the folder at a path may be replaced."""


def _anything(path: Path) -> None:
    """Accept any folder: the caller has checked it."""


def _partial_name(destination: Path) -> str:
    """The name of the unfinished folder of a destination, which a file system takes wherever it takes the other one."""
    suffix = f".partial-{hashlib.sha256(os.fsencode(destination)).hexdigest()[:12]}"
    name = os.fsencode(destination.name)
    if len(name) + len(suffix) <= _NAME_BYTES:
        return destination.name + suffix
    return name[: _NAME_BYTES - len(suffix)].decode("utf-8", "ignore") + suffix


class Publication:
    """One destination folder in the making; `folder` is where its files are written."""

    def __init__(
        self, destination: Path, fingerprint: str, rank: int = 0, replaceable: CheckReplaceable = _anything
    ) -> None:
        """Name the places; nothing is touched yet.

        Args:
            destination: the folder to publish, an absolute path.
            fingerprint: identifies what is written, so that only the same work is ever continued.
            rank: this process among those that share the work; the first opens and publishes.
            replaceable: looks at what would be replaced, before the work and again when it is moved aside.
        """
        self.destination = destination
        self._name = _partial_name(destination)
        self.folder = destination.parent / self._name / _CONTENT
        self._fingerprint, self._rank, self._replaceable = fingerprint, rank, replaceable
        self._held = contextlib.ExitStack()
        self._replaces: tuple[int, int] | None = None

    def open(self, *, force: bool = False, resume: bool = False) -> None:
        """Make or reopen the unfinished folder, and lock the destination until `close`.

        Args:
            force: replace an existing destination.
            resume: continue what an interrupted run left; otherwise it is written anew.

        Raises:
            DestinationError: the destination exists, cannot be written, or is being written by another process.
        """
        try:
            self._check_destination(force)
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._parent = self._held.enter_context(Folder.at(self.destination.parent))
            self._root = self._held.enter_context(self._locked_root())
            self._put_back()
            self._check_destination(force)
            if not (resume and self._continues()):
                self._begin()
            self._enter()
        except OSError as error:
            raise cannot_write(self.destination, error) from error

    def join(self) -> None:
        """Take part, in the processes that did not open it.

        Raises:
            DestinationError: the unfinished folder cannot be entered.
        """
        if self._rank:
            try:
                self._parent = self._held.enter_context(Folder.at(self.destination.parent))
                self._root = self._held.enter_context(self._entered_root())
                self._enter()
            except OSError as error:
                raise cannot_write(self.destination, error) from error

    def done(self) -> dict[int, int]:
        """Records that interrupted runs say to have finished, with their CRC-32, by number; not yet to be believed.

        Raises:
            DestinationError: the disk refuses.
        """
        found: dict[int, int] = {}
        try:
            texts = [self._root.read(journal, _JOURNAL_LIMIT) or b"" for journal in self._journals()]
        except OSError as error:
            raise cannot_write(self.destination, error) from error
        for text in texts:
            for line in text.splitlines():
                # The last line may be half written: the process was killed.
                with contextlib.suppress(ValueError, TypeError):
                    number, crc = json.loads(line)
                    found[int(number)] = int(crc)
        return found

    def note(self, number: int, crc: int) -> None:
        """Write into the journal that a record is finished.

        Raises:
            DestinationError: the disk refuses.
        """
        try:
            descriptor = self._root.open(f"{_JOURNAL}{self._rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, f"[{number}, {crc}]\n".encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise cannot_write(self.destination, error) from error

    def publish(self) -> None:
        """Flush all files and give the folder its name, in one step.

        Raises:
            DestinationError: the disk refuses, or the destination is not what it was at the beginning; it is left as
                it is, and so is what was written.
        """
        try:
            self.content.flush()
            self._root.flush()
            if self._replaces is None:
                self._publish_new()
            else:
                self._replace()
            os.fsync(self._parent.descriptor)
            self._parent.remove(self._name)
        except OSError as error:
            raise cannot_write(self.destination, error) from error

    def close(self) -> None:
        """Let go; what is unfinished stays for a later run."""
        self._held.close()

    def _check_destination(self, force: bool) -> None:
        """At the destination, before the work."""
        status = _status(self.destination)
        if status is not None and not force:
            raise DestinationError(
                "the destination exists already",
                where=str(self.destination),
                hint="choose another destination, or replace it: --force",
            )
        if status is not None:
            self._replaceable(self.destination)
        self._replaces = _identity(status) if status is not None else None

    def _locked_root(self) -> Folder:
        while True:
            with contextlib.suppress(FileExistsError):
                self._parent.make(self._name, 0o700)
            root = self._entered_root()
            lock = root.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            self._held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                root.close()
                raise DestinationError(
                    "another process is writing the same destination",
                    where=str(root.path),
                    hint="wait for it, or stop it",
                ) from error
            except OSError as error:
                root.close()
                if error.errno not in _NO_LOCKS:
                    raise
                raise DestinationError(
                    "this file system has no locks, so a second process could write the same destination",
                    found=f"flock: {error.strerror}", where=str(root.path),
                    hint="mount it with locks (Lustre: -o flock), or write to a local disk and copy the result",
                ) from error  # fmt: skip
            # Whoever held it may have removed the folder when it was done.
            if _identity(root.status()) == _identity(self._parent.status(self._name)):
                return root
            root.close()

    def _entered_root(self) -> Folder:
        """The unfinished folder, if it is this user's own.

        Raises:
            DestinationError: it is a link, another user's, or others may write to it.
        """
        status = self._parent.status(self._name)
        root = self._parent.enter(self._name) if status is None or stat.S_ISDIR(status.st_mode) else None
        if root is not None:
            of_root = os.fstat(root.descriptor)
            if of_root.st_uid == os.geteuid() and not of_root.st_mode & 0o022:
                return root
            root.close()
        raise DestinationError(
            "refusing to use the temporary folder: it is a symlink, owned by another user, or writable by others",
            where=str(self._parent.path / self._name),
            hint="remove it, or choose a destination in a folder of your own",
        )

    def _put_back(self) -> None:
        """What a run had moved aside when it was killed, before the new folder had the name."""
        if self._root.status(_REPLACED) is not None and _status(self.destination) is None:
            move_new(self._root, _REPLACED, self._parent, self.destination.name)

    def _continues(self) -> bool:
        """Whether there is unfinished work to continue.

        Raises:
            DestinationError: there is, but it is other work. Hours of it may be thrown away by the user alone.
        """
        try:
            fingerprint, made = json.loads(self._root.read(_WORK, _WORK_LIMIT) or b"")
        except (ValueError, TypeError):
            return False
        status = self._root.status(_CONTENT)
        # After an exchange of names, what is called content is the folder that was replaced.
        if status is None or status.st_ino != made:
            return False
        if fingerprint != self._fingerprint:
            raise DestinationError(
                "the interrupted conversion to this destination had another source, other options or another version",
                where=str(self._root.path),
                hint="to continue it, pass the source and options of the interrupted run; to discard it and start "
                "again, leave --resume out",
            )
        return True

    def _begin(self) -> None:
        for name in self._root.names():
            if name != _LOCK:
                self._root.remove(name)
        self._root.make(_CONTENT)
        made = self._root.status(_CONTENT)
        descriptor = self._root.open(_WORK, _MINE, 0o600)
        try:
            os.write(descriptor, json.dumps([self._fingerprint, made.st_ino if made else 0]).encode())
        finally:
            os.close(descriptor)

    def _enter(self) -> None:
        self.content = self._held.enter_context(self._root.enter(_CONTENT))

    def _journals(self) -> list[str]:
        return [name for name in self._root.names() if name.startswith(_JOURNAL)]

    def _publish_new(self) -> None:
        try:
            move_new(self._root, _CONTENT, self._parent, self.destination.name)
        except FileExistsError as error:
            raise self._changed("the destination was created by something else during the conversion") from error

    def _replace(self) -> None:
        """Move the old folder aside, take its name, and look at what was moved before it is removed."""
        if exchange(self._root, _CONTENT, self._parent, self.destination.name):
            aside = _CONTENT
        else:
            move_new(self._parent, self.destination.name, self._root, _REPLACED)
            aside = _REPLACED
        try:
            if _identity(self._root.status(aside)) != self._replaces:
                raise self._changed("another folder took the destination's place during the conversion")
            self._replaceable(self._root.path / aside)
            if aside == _REPLACED:
                move_new(self._root, _CONTENT, self._parent, self.destination.name)
        except BaseException:
            self._undo(aside)
            raise

    def _undo(self, aside: str) -> None:
        if aside == _CONTENT:
            exchange(self._root, _CONTENT, self._parent, self.destination.name)
        else:
            move_new(self._root, _REPLACED, self._parent, self.destination.name)

    def _changed(self, what: str) -> DestinationError:
        return DestinationError(
            f"{what}; nothing was replaced",
            where=str(self.destination),
            hint="remove it if it is not needed, and continue with --resume: what was written is kept",
        )


def _status(path: Path) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat()
    return None


def _identity(status: os.stat_result | None) -> tuple[int, int] | None:
    return None if status is None else (status.st_dev, status.st_ino)
