"""Checksums of records that are read in pieces: each byte is looked at once, for the record that it comes from and for
the one that it goes to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.planning.array_location import Extent, RawArray, Rearranged, Scaled
from mcore_ckpt_ext.planning.plan import Copy, Plan
from mcore_ckpt_ext.storage.crc32 import Piece, appended, crc32
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.tensor_location import Payload
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

Place = tuple[str, int, int]
"""Of an archive, or of bare elements: the file, the first byte there, and the length."""


def is_plain(copy: Copy, payload: Payload) -> bool:
    """Whether the elements are stored as they are counted."""
    return payload.scaled is None and not isinstance(copy.extent, (Rearranged, Scaled))


@dataclass
class _Record:
    """A stored record whose pieces pass by: what reads it for its checksum, its size and CRC-32, the pieces so far.

    `place`: of what is right from end to end when this record is.
    """

    verify: Callable[[], None]
    size: int
    expected: int
    before: int
    left: int
    place: Place | None
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)

    def is_right(self) -> bool:
        """Whether the pieces are the record from end to end, and its checksum is theirs."""
        crc, done = 0, 0
        for start, (length, piece) in sorted(self.pieces.items()):
            if start != done:
                return False
            crc, done = appended(crc, piece, length), start + length
        return done == self.size and crc == self.expected


class Checksums:
    """Compares the checksums of all records that are looked into; safe to use from several threads.

    Small records are read for it at once. A large one waits until all of its pieces have passed; what is left in the
    end, `rest`, is to be checked. `right` are the archives and arrays of which every checksum was
    compared, and is right.
    """

    WORTH = 1 << 16
    """Bytes from which on it costs less to put checksums together than to look at the bytes once more."""

    def __init__(self, reader: FolderReader) -> None:
        self._reader = reader
        self.right: set[Place] = set()
        self._waiting: dict[tuple[str, int], _Record] = {}
        self._lock = threading.Lock()

    def look(self, payload: Payload, archive: TorchArchive, names: Sequence[str]) -> None:
        """Take notice of records of an archive, one of which holds a payload.

        Raises:
            UnreadableCheckpointError: the checksum of a small one differs.
        """
        place = archive.place if set(names) == set(archive.names) else None
        waiting: list[_Record] = []
        for name in names:
            begin, size, expected = archive.place_of(name)
            if size >= self.WORTH and begin <= payload.offset < begin + size:
                verify = partial(_verify_record, self._reader, archive.place, name)
                waiting.append(_Record(verify, size, expected, payload.offset - begin, size, place))
            else:
                archive.verify_checksums(only=name)
        for record in waiting:  # last, because the archive is right when it is
            self._wait_for(payload, record)
        if not waiting:
            self._note_right(place)

    def look_at_array(self, payload: Payload, array: RawArray) -> None:
        """Take notice of bare elements, which are the payload, if their checksum is known.

        Raises:
            UnreadableCheckpointError: the checksum of a small one differs.
        """
        place = array.file, array.offset, array.length
        if array.crc is not None and array.length >= self.WORTH:
            verify = partial(verify_array, self._reader, array)
            self._wait_for(payload, _Record(verify, array.length, array.crc, 0, array.length, place))
        else:
            verify_array(self._reader, array)
            self._note_right(place if array.crc is not None else None)

    def _note_right(self, place: Place | None) -> None:
        if place is not None:
            with self._lock:
                self.right.add(place)

    def _wait_for(self, payload: Payload, record: _Record) -> None:
        with self._lock:
            self._waiting[payload.file, payload.offset] = record

    def passed(self, payload: Payload, position: int, data: memoryview) -> int:
        """The CRC-32 of bytes from `position` of a payload on, as they have just been read.

        Raises:
            UnreadableCheckpointError: with them the record is complete, and its checksum differs.
        """
        crc = crc32(data)
        with self._lock:
            record = self._waiting.get((payload.file, payload.offset))
            if record is None or record.before + position in record.pieces:
                return crc
            record.pieces[record.before + position] = len(data), crc
            record.left -= len(data)
            if record.left:
                return crc
            del self._waiting[payload.file, payload.offset]
        if record.is_right():
            self._note_right(record.place)
        else:
            record.verify()  # which says where it is; or pieces overlapped
        return crc

    def of_plan(
        self, plan: Plan, destinations: Sequence[torch.Tensor], locate: Callable[[Extent], Payload]
    ) -> list[tuple[int, Piece]]:
        """Take what a plan has just read in large pieces as passed.

        Args:
            plan: what was executed.
            destinations: by target index, 1-D contiguous tensors on the processor.
            locate: where the elements of an array lie.

        Returns:
            The target of each such piece, and the piece in bytes.

        Raises:
            UnreadableCheckpointError: the checksum of a record differs.
        """
        found: list[tuple[int, Piece]] = []
        for copy in plan.copies:
            payload, destination = locate(copy.extent), destinations[copy.target]
            if not is_plain(copy, payload) or destination.dtype != payload.dtype:
                continue
            memory, size = memoryview(destination.detach().view(torch.uint8).numpy()), payload.dtype.itemsize
            for source, target, length, count, *_ in copy.runs.rows():
                if count == 1 and length * size >= self.WORTH:
                    begin, end = target * size, (target + length) * size
                    crc = self.passed(payload, source * size, memory[begin:end])
                    found.append((copy.target, (begin, end, crc)))
        return found

    def rest(self) -> list[Callable[[], None]]:
        """What reads each of the records of which not all pieces have passed for its checksum, and raises likewise."""
        with self._lock:
            return [record.verify for record in self._waiting.values()]


class Confirmed(Checksums):
    """Finds out what is right while it is read for another purpose, and refuses nothing.

    What is not in `right` is to be checked by whoever asks, and may be damaged, or read in pieces that are too small.
    """

    def look(self, payload: Payload, archive: TorchArchive, names: Sequence[str]) -> None:
        """Take notice of records of an archive."""
        with suppress(UnreadableCheckpointError):
            super().look(payload, archive, names)

    def look_at_array(self, payload: Payload, array: RawArray) -> None:
        """Take notice of bare elements."""
        with suppress(UnreadableCheckpointError):
            super().look_at_array(payload, array)

    def of_plan(
        self, plan: Plan, destinations: Sequence[torch.Tensor], locate: Callable[[Extent], Payload]
    ) -> list[tuple[int, Piece]]:
        """Take what a plan has just read as passed."""
        with suppress(UnreadableCheckpointError):
            return super().of_plan(plan, destinations, locate)
        return []


def verify_array(reader: FolderReader, array: RawArray) -> None:
    """Compare the CRC-32 of bare elements with the one that is known of them, if one is.

    Raises:
        UnreadableCheckpointError: it differs.
    """
    if array.crc is not None and reader.checksum(array.file, array.offset, array.length) != array.crc:
        raise UnreadableCheckpointError(
            "an array of the checkpoint is damaged: its checksum differs",
            where=f"{reader.folder / array.file} at byte {array.offset}",
        )


def _verify_record(reader: FolderReader, archive: tuple[str, int, int], name: str) -> None:
    """Not by a method of the archive: then its directory would be kept until all pieces have passed."""
    TorchArchive(reader, *archive).verify_checksums(only=name)
