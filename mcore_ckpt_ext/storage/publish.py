"""Publishes a folder: it is written next to its destination, and renamed when it is complete.

If the process is killed at any moment, the destination is either as before or the new folder. An unfinished folder has
`.partial-` in its name. It belongs to this user (mode 0700), there is one for each destination, and it is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from mcore_ckpt_ext.errors import DestinationError
from mcore_ckpt_ext.storage.atomic_files import cannot_write
from mcore_ckpt_ext.storage.folder import Folder, exchange, move_new

_CONTENT = "content"
_REPLACED = "replaced"
_LOCK = "lock"
_WORK = "work"
_JOURNAL = "journal"
_NAME_BYTES = 255  # NAME_MAX of Linux
_WORK_LIMIT = 1 << 12
_JOURNAL_LIMIT = 1 << 30
_MINE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_LOCKS_NOT_OFFERED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

CheckReplaceable = Callable[[Path], None]
"""Raises DestinationError unless the folder at a path may be replaced."""


def _anything(path: Path) -> None:
    """Accept any folder, because the caller has checked it."""


def _partial_name(destination: Path) -> str:
    """Return the name of the unfinished folder of a destination, shortened to what a file system accepts."""
    suffix = f".partial-{hashlib.sha256(os.fsencode(destination)).hexdigest()[:12]}"
    name = os.fsencode(destination.name)
    if len(name) + len(suffix) <= _NAME_BYTES:
        return destination.name + suffix
    return name[: _NAME_BYTES - len(suffix)].decode("utf-8", "ignore") + suffix


class Publication:
    """A destination folder that is being written; its files are written to `folder`."""

    def __init__(
        self, destination: Path, fingerprint: str, rank: int = 0, replaceable: CheckReplaceable = _anything
    ) -> None:
        """Compute the paths; nothing is written yet.

        Args:
            destination: the folder to publish, an absolute path.
            fingerprint: identifies the conversion, so that only the same one is continued.
            rank: rank of this process among those that share the work; rank 0 opens and publishes.
            replaceable: checks the folder that would be replaced, before the work and again before it is removed.
        """
        self.destination = destination
        self._name = _partial_name(destination)
        self.folder = destination.parent / self._name / _CONTENT
        self._fingerprint = fingerprint
        self._rank = rank
        self._replaceable = replaceable
        self._held = contextlib.ExitStack()
        self._replaces: tuple[int, int] | None = None

    def open(self, *, force: bool = False, resume: bool = False) -> None:
        """Create or reopen the unfinished folder, and lock the destination until `close`.

        Args:
            force: replace an existing destination.
            resume: continue an interrupted run; otherwise its files are discarded.

        Raises:
            DestinationError: the destination exists, cannot be written, or is being written by another process.
        """
        try:
            self._check_destination(force)
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._parent = self._held.enter_context(Folder.at(self.destination.parent))
            self._root = self._held.enter_context(self._locked_root())
            self._restore_replaced()
            self._check_destination(force)
            if not (resume and self._can_continue()):
                self._begin()
            self._enter()
        except OSError as error:
            raise cannot_write(self.destination, error) from error

    def join(self) -> None:
        """Join the publication in the processes that did not open it.

        Raises:
            DestinationError: the unfinished folder cannot be opened.
        """
        if self._rank:
            try:
                self._parent = self._held.enter_context(Folder.at(self.destination.parent))
                self._root = self._held.enter_context(self._entered_root())
                self._enter()
            except OSError as error:
                raise cannot_write(self.destination, error) from error

    def finished_records(self) -> dict[int, int]:
        """Return the CRC-32 of records that interrupted runs have recorded as finished, by number.

        The caller must check them: the records may not have reached the disk.

        Raises:
            DestinationError: the journal cannot be read.
        """
        checksums: dict[int, int] = {}
        try:
            journals = [name for name in self._root.names() if name.startswith(_JOURNAL)]
            texts = [self._root.read(journal, _JOURNAL_LIMIT) or b"" for journal in journals]
        except OSError as error:
            raise cannot_write(self.destination, error) from error
        for text in texts:
            for line in text.splitlines():
                # The last line may be incomplete, because the process was killed.
                with contextlib.suppress(ValueError, TypeError):
                    number, crc = json.loads(line)
                    checksums[int(number)] = int(crc)
        return checksums

    def record_finished(self, number: int, crc: int) -> None:
        """Record a finished record in the journal.

        Raises:
            DestinationError: the journal cannot be written.
        """
        try:
            descriptor = self._root.open(f"{_JOURNAL}{self._rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, f"[{number}, {crc}]\n".encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise cannot_write(self.destination, error) from error

    def publish(self) -> list[str]:
        """Flush all files, and rename the folder to its destination atomically.

        Returns:
            What could not be tidied up after the destination was complete, as notes for the user; usually empty.

        Raises:
            DestinationError: writing fails, or the destination has changed since the beginning. The destination and the
                written files are then left as they are.
        """
        try:
            self.content.flush()
            self._root.flush()
            if self._replaces is None:
                self._publish_new()
            else:
                self._replace()
        except OSError as error:
            raise cannot_write(self.destination, error) from error
        return list(self._tidy_up())

    def _tidy_up(self) -> Iterator[str]:
        """Flush the rename and remove what is left; yield a note for what fails after publishing."""
        try:
            os.fsync(self._parent.descriptor)
        except OSError as error:
            yield (
                f"the new {self.destination} is complete, but its name could not be flushed to the disk "
                f"({error.strerror}), so a crash of the machine may undo it: run sync"
            )
        try:
            self._parent.remove(self._name)
        except OSError as error:
            leftover = "the temporary folder" if self._replaces is None else "the folder that it replaced"
            yield (
                f"the new {self.destination} is complete, but {leftover} could not be removed ({error.strerror}); "
                f"what is left of it lies in {self._root.path}: remove it with rm -r"
            )

    def close(self) -> None:
        """Release the lock; an unfinished folder remains for a later run."""
        self._held.close()

    def _check_destination(self, force: bool) -> None:
        """Check that the destination is free or may be replaced."""
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
                if error.errno not in _LOCKS_NOT_OFFERED:
                    raise
                raise DestinationError(
                    "this file system has no locks, so a second process could write the same destination",
                    found=f"flock: {error.strerror}",
                    where=str(root.path),
                    hint="mount it with locks (Lustre: -o flock), or write to a local disk and copy the result",
                ) from error
            # The process that held the lock may have removed the folder when it finished.
            if _identity(root.status()) == _identity(self._parent.status(self._name)):
                return root
            root.close()

    def _entered_root(self) -> Folder:
        """Open the unfinished folder, which must belong to this user.

        Raises:
            DestinationError: the folder is a link, belongs to another user, or is writable by others.
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

    def _restore_replaced(self) -> None:
        """Restore a destination that a killed run had moved away before its new folder was renamed."""
        if self._root.status(_REPLACED) is not None and _status(self.destination) is None:
            move_new(self._root, _REPLACED, self._parent, self.destination.name)

    def _can_continue(self) -> bool:
        """Return whether an interrupted run can be continued.

        Raises:
            DestinationError: the interrupted run was another conversion. Only the user may discard its result.
        """
        try:
            fingerprint, made = json.loads(self._root.read(_WORK, _WORK_LIMIT) or b"")
        except (ValueError, TypeError):
            return False
        status = self._root.status(_CONTENT)
        # After an exchange of names, `content` is the folder that was replaced.
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

    def _publish_new(self) -> None:
        try:
            move_new(self._root, _CONTENT, self._parent, self.destination.name)
        except FileExistsError as error:
            raise self._change_error("the destination was created by something else during the conversion") from error

    def _replace(self) -> None:
        """Move the old folder away, rename the new one, and check the old one before it is removed."""
        if exchange(self._root, _CONTENT, self._parent, self.destination.name):
            aside = _CONTENT
        else:
            move_new(self._parent, self.destination.name, self._root, _REPLACED)
            aside = _REPLACED
        try:
            if _identity(self._root.status(aside)) != self._replaces:
                raise self._change_error("another folder took the destination's place during the conversion")
            self._replaceable(self._root.path / aside)
            if aside == _REPLACED:
                move_new(self._root, _CONTENT, self._parent, self.destination.name)
        except BaseException:
            if aside == _CONTENT:
                exchange(self._root, _CONTENT, self._parent, self.destination.name)
            else:
                move_new(self._root, _REPLACED, self._parent, self.destination.name)
            raise

    def _change_error(self, reason: str) -> DestinationError:
        return DestinationError(
            f"{reason}; nothing was replaced",
            where=str(self.destination),
            hint="remove it if it is not needed, and continue with --resume: what was written is kept",
        )


def _status(path: Path) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat()
    return None


def _identity(status: os.stat_result | None) -> tuple[int, int] | None:
    return None if status is None else (status.st_dev, status.st_ino)
