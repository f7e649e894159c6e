"""Checksums of records that are read in pieces: each byte is looked at once, for the record that it comes from and for
the one that it goes to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy
from numpy.typing import NDArray

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.planning.array_location import Extent, RawArray, ScaleCodec, TransposeCodec
from mcore_ckpt_ext.planning.plan import Copy, Plan
from mcore_ckpt_ext.storage.crc32 import Piece, appended, crc32
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.tensor_location import TensorLocation
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

# Of a matrix, packed at once: half of a processor's own cache.
_ROWS_BYTES = 1 << 19

Place = tuple[str, int, int]
"""Of an archive, or of bare elements: the file, the first byte there, and the length."""


def is_plain(copy: Copy, payload: TensorLocation) -> bool:
    """Whether the elements are stored as they are counted."""
    return payload.scaled is None and not isinstance(copy.extent, (TransposeCodec, ScaleCodec))


@dataclass
class _Record:
    """A stored record whose pieces pass by.

    Attributes:
        verify: reads all of it for its checksum.
        read: the CRC-32 of bytes of the file, given the first one and their number.
        begin: its first byte in the file.
        size: in bytes.
        expected: its CRC-32.
        before: bytes of it before the payload that is looked into.
        left: bytes that have not passed.
        place: of what is right from end to end when this record is.
        archive: the archive that it is a record of, and its name there.
        pieces: length and CRC-32 of the pieces that have passed, by their first byte in the record.
    """

    verify: Callable[[], None]
    read: Callable[[int, int], int]
    begin: int
    size: int
    expected: int
    before: int
    left: int
    place: Place | None
    archive: tuple[Place, str] | None = None
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)

    def is_right(self, read: Callable[[int, int], int] | None = None) -> bool:
        """Whether the pieces have the record's checksum, with what lies between them if `read` reads it."""
        crc, done = 0, 0
        for start, (length, piece) in [*sorted(self.pieces.items()), (self.size, (0, 0))]:
            if start > done and read is not None:
                crc, done = appended(crc, read(self.begin + done, start - done), start - done), start
            if start != done:
                return False
            crc, done = appended(crc, piece, length), start + length
        return crc == self.expected


class Checksums:
    """Compares the checksums of all records that are looked into; safe to use from several threads.

    Small records are read for it at once. A large one waits until all of its pieces have passed; what is left in the
    end, `rest`, is to be checked.

    Attributes:
        right: the archives and arrays of which every checksum was compared, and is right.
        right_records: the names of records, by their archive, whose checksums are right, of archives of many.
    """

    WORTH = 1 << 16
    """Bytes from which on it costs less to put checksums together than to look at the bytes once more."""

    def __init__(self, reader: FolderReader) -> None:
        self._reader = reader
        self.right: set[Place] = set()
        self.right_records: dict[Place, set[str]] = {}
        self._waiting: dict[tuple[str, int], _Record] = {}
        self._lock = threading.Lock()

    def add_records(self, payload: TensorLocation, archive: TorchArchive, names: Sequence[str]) -> None:
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
                read = partial(self._reader.checksum, payload.file)
                own = None if place else (archive.place, name)
                waiting.append(_Record(verify, read, begin, size, expected, payload.offset - begin, size, place, own))
            else:
                archive.verify_checksums(only=name)
                self._note_right(None, None if place else (archive.place, name))
        for record in waiting:  # last, because the archive is right when it is
            self._wait_for(payload, record)
        if not waiting:
            self._note_right(place)

    def look_at_array(self, payload: TensorLocation, array: RawArray) -> None:
        """Take notice of bare elements, which are the payload, if their checksum is known.

        Raises:
            UnreadableCheckpointError: the checksum of a small one differs.
        """
        place = array.file, array.offset, array.length
        if array.crc is not None and array.length >= self.WORTH:
            verify = partial(verify_array, self._reader, array)
            read = partial(self._reader.checksum, array.file)
            record = _Record(verify, read, array.offset, array.length, array.crc, 0, array.length, place)
            self._wait_for(payload, record)
        else:
            verify_array(self._reader, array)
            self._note_right(place if array.crc is not None else None)

    def add(self, right: Iterable[Place], right_records: Mapping[Place, Iterable[str]]) -> None:
        """Take what another process has found right."""
        with self._lock:
            self.right.update(right)
            for place, names in right_records.items():
                self.right_records.setdefault(place, set()).update(names)

    def _note_right(self, place: Place | None, record: tuple[Place, str] | None = None) -> None:
        with self._lock:
            if place is not None:
                self.right.add(place)
            if record is not None:
                self.right_records.setdefault(record[0], set()).add(record[1])

    def _wait_for(self, payload: TensorLocation, record: _Record) -> None:
        with self._lock:
            self._waiting[payload.file, payload.offset] = record

    def passed(self, payload: TensorLocation, position: int, data: memoryview) -> int:
        """The CRC-32 of bytes from `position` of a payload on, as they have just been read.

        Raises:
            UnreadableCheckpointError: with them the record is complete, and its checksum differs.
        """
        crc = crc32(data)
        self._note_piece(payload, position, len(data), crc)
        return crc

    def _note_piece(self, payload: TensorLocation, position: int, length: int, crc: int) -> None:
        """Take the CRC-32 of bytes that have passed; errors as of `passed`."""
        with self._lock:
            record = self._waiting.get((payload.file, payload.offset))
            if record is None or record.before + position in record.pieces:
                return
            record.pieces[record.before + position] = length, crc
            record.left -= length
            if record.left:
                return
            del self._waiting[payload.file, payload.offset]
        if not record.is_right():
            record.verify()  # which says where it is; or pieces overlapped
        self._note_right(record.place, record.archive)

    def of_plan(
        self, plan: Plan, destinations: Sequence[torch.Tensor], locate: Callable[[Extent], TensorLocation]
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
            if not is_plain(copy, payload) or destination.dtype != payload.dtype.torch:
                continue
            memory, size = memoryview(destination.detach().view(torch.uint8).numpy()), payload.dtype.itemsize
            for source, target, length, count, source_stride, target_stride in copy.runs.rows():
                if length * count * size < self.WORTH:
                    continue
                begin, end = target * size, (target + length) * size
                if count == 1:
                    crc = self.passed(payload, source * size, memory[begin:end])
                    found.append((copy.target, (begin, end, crc)))
                elif source_stride == length:
                    rows = numpy.ndarray((count,), f"V{length * size}", memory, begin, (target_stride * size,))
                    self._note_piece(payload, source * size, rows.nbytes, _checksum_of_rows(rows))
        return found

    def rest(self) -> list[Callable[[], None]]:
        """What compares each checksum of which not all pieces have passed: it reads the others, and raises likewise."""
        with self._lock:
            return [partial(self._finish, record) for record in self._waiting.values()]

    def _finish(self, record: _Record) -> None:
        if not record.pieces or not record.is_right(record.read):
            record.verify()  # which says where it is; or pieces overlapped
        self._note_right(record.place, record.archive)


class Confirmed(Checksums):
    """Finds out what is right while it is read for another purpose, and refuses nothing.

    What is not in `right` is to be checked by whoever asks, and may be damaged, or read in pieces that are too small.
    """

    def add_records(self, payload: TensorLocation, archive: TorchArchive, names: Sequence[str]) -> None:
        """Take notice of records of an archive."""
        with suppress(UnreadableCheckpointError):
            super().add_records(payload, archive, names)

    def look_at_array(self, payload: TensorLocation, array: RawArray) -> None:
        """Take notice of bare elements."""
        with suppress(UnreadableCheckpointError):
            super().look_at_array(payload, array)

    def of_plan(
        self, plan: Plan, destinations: Sequence[torch.Tensor], locate: Callable[[Extent], TensorLocation]
    ) -> list[tuple[int, Piece]]:
        """Take what a plan has just read as passed."""
        with suppress(UnreadableCheckpointError):
            return super().of_plan(plan, destinations, locate)
        return []


def _checksum_of_rows(rows: NDArray[numpy.void]) -> int:
    """The CRC-32 of the bytes of a matrix, whose rows need not follow each other in memory."""
    at_once, crc = max(1, _ROWS_BYTES // rows.itemsize), 0
    for first in range(0, len(rows), at_once):
        crc = crc32(rows[first : first + at_once].tobytes(), crc)
    return crc


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
