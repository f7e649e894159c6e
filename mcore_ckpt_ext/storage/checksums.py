"""Verifies checksums of records that are read in pieces, and reuses them for those that are written.

So the checksum of each byte is computed only once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.lazy_torch import numpy, torch
from mcore_ckpt_ext.planning.array_location import Extent, QuantizedMatrix, RawArray, ReorderedMatrix
from mcore_ckpt_ext.planning.plan import Plan, PlannedRead
from mcore_ckpt_ext.storage.crc32 import Piece, combine_crc32, crc32
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.tensor_location import TensorLocation
from mcore_ckpt_ext.storage.torch_archive import ByteRange, TorchArchive

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Bytes of a matrix that are made contiguous at once: half of the cache of a processor core.
_ROWS_BYTES = 1 << 19


def is_plain(read: PlannedRead, location: TensorLocation) -> bool:
    """Return whether the elements are stored unscaled and in their order."""
    return location.scaled is None and not isinstance(read.extent, (ReorderedMatrix, QuantizedMatrix))


@dataclass
class _PendingRecord:
    """A stored record that is read in pieces.

    Attributes:
        verify: reads the whole record and compares its checksum.
        read: returns the CRC-32 of bytes of the file, given the first byte and their number.
        begin: first byte of the record in the file.
        size: size in bytes.
        expected: stored CRC-32.
        before: number of bytes in the record before the tensor.
        left: number of bytes that have not been read.
        whole: the archive or array that is intact if this record is; None if other records must be verified, too.
        part: the archive of many records that contains this one, and the name of the record.
        pieces: length and CRC-32 of the pieces that have been read, by their first byte in the record.
    """

    verify: Callable[[], None]
    read: Callable[[int, int], int]
    begin: int
    size: int
    expected: int
    before: int
    left: int
    whole: ByteRange | None
    part: tuple[ByteRange, str] | None = None
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)

    def is_intact(self, read: Callable[[int, int], int] | None = None) -> bool:
        """Return whether the pieces, and the gaps that `read` reads between them, have the record's checksum."""
        crc = 0
        done = 0
        for start, (length, piece) in [*sorted(self.pieces.items()), (self.size, (0, 0))]:
            if start > done and read is not None:
                crc = combine_crc32(crc, read(self.begin + done, start - done), start - done)
                done = start
            if start != done:
                return False
            crc = combine_crc32(crc, piece, length)
            done = start + length
        return crc == self.expected


class Checksums:
    """Compares the checksums of all records that are read; safe to use from several threads.

    A small record is read and compared at once. A large one is compared when all of its pieces have been read; `rest`
    compares records that have not been read completely.

    Attributes:
        verified: the archives and arrays whose checksums were all compared and match.
        verified_records: the names of verified records by their archive, for archives of many records.
    """

    WORTH = 1 << 16
    """Size in bytes from which combining checksums costs less than reading the bytes once more."""

    def __init__(self, reader: FolderReader) -> None:
        self._reader = reader
        self.verified: set[ByteRange] = set()
        self.verified_records: dict[ByteRange, set[str]] = {}
        self._waiting: dict[tuple[str, int], _PendingRecord] = {}
        self._lock = threading.Lock()

    def add_records(self, location: TensorLocation, archive: TorchArchive, names: Sequence[str]) -> None:
        """Register records of an archive, one of which contains a tensor; without checksums, do nothing.

        Raises:
            UnreadableCheckpointError: the checksum of a small record differs.
        """
        if not archive.has_checksums:
            return
        whole = archive.byte_range if set(names) == set(archive.names) else None
        waiting: list[_PendingRecord] = []
        for name in names:
            begin, size, expected = archive.find_record(name)
            if size >= self.WORTH and begin <= location.offset < begin + size:
                verify = partial(_verify_record, self._reader, archive.byte_range, name)
                read = partial(self._reader.checksum, location.file)
                part = None if whole else (archive.byte_range, name)
                waiting.append(
                    _PendingRecord(verify, read, begin, size, expected, location.offset - begin, size, whole, part)
                )
            else:
                archive.verify_checksums(only=name)
                self._add_verified(None, None if whole else (archive.byte_range, name))
        for record in waiting:  # last, because the archive is verified when this record is
            self._wait_for(location, record)
        if not waiting:
            self._add_verified(whole)

    def add_array(self, location: TensorLocation, array: RawArray) -> None:
        """Register a raw array, whose checksum may be known.

        Raises:
            UnreadableCheckpointError: the checksum of a small array differs.
        """
        whole = array.file, array.offset, array.length
        if array.crc is not None and array.length >= self.WORTH:
            verify = partial(verify_array, self._reader, array)
            read = partial(self._reader.checksum, array.file)
            record = _PendingRecord(verify, read, array.offset, array.length, array.crc, 0, array.length, whole)
            self._wait_for(location, record)
        else:
            verify_array(self._reader, array)
            self._add_verified(whole if array.crc is not None else None)

    def add(self, verified: Iterable[ByteRange], verified_records: Mapping[ByteRange, Iterable[str]]) -> None:
        """Add what another process has verified."""
        with self._lock:
            self.verified.update(verified)
            for archive, names in verified_records.items():
                self.verified_records.setdefault(archive, set()).update(names)

    def _add_verified(self, whole: ByteRange | None, part: tuple[ByteRange, str] | None = None) -> None:
        with self._lock:
            if whole is not None:
                self.verified.add(whole)
            if part is not None:
                archive, name = part
                self.verified_records.setdefault(archive, set()).add(name)

    def _wait_for(self, location: TensorLocation, record: _PendingRecord) -> None:
        with self._lock:
            self._waiting[location.file, location.offset] = record

    def add_piece(self, location: TensorLocation, position: int, data: memoryview) -> int:
        """Add bytes of a tensor, from `position` on, that have just been read, and return their CRC-32.

        Raises:
            UnreadableCheckpointError: the record is now complete, and its checksum differs.
        """
        crc = crc32(data)
        self._store_piece(location, position, len(data), crc)
        return crc

    def _store_piece(self, location: TensorLocation, position: int, length: int, crc: int) -> None:
        """Store the CRC-32 of bytes that have been read; raises as `add_piece` does."""
        with self._lock:
            record = self._waiting.get((location.file, location.offset))
            if record is None or record.before + position in record.pieces:
                return
            record.pieces[record.before + position] = length, crc
            record.left -= length
            if record.left:
                return
            del self._waiting[location.file, location.offset]
        if not record.is_intact():
            record.verify()  # raises an error with the position, or pieces overlapped
        self._add_verified(record.whole, record.part)

    def add_plan(
        self, plan: Plan, destinations: Sequence[torch.Tensor], locate: Callable[[Extent], TensorLocation]
    ) -> list[tuple[int, Piece]]:
        """Add the large pieces that a plan has just read.

        Args:
            plan: the plan that was executed.
            destinations: contiguous 1-D CPU tensors by target index.
            locate: returns the location of an array's elements.

        Returns:
            The target index and the byte range of each piece, with its CRC-32.

        Raises:
            UnreadableCheckpointError: the checksum of a record differs.
        """
        pieces: list[tuple[int, Piece]] = []
        for read in plan.reads:
            location = locate(read.extent)
            destination = destinations[read.target]
            if not is_plain(read, location) or destination.dtype != location.dtype.torch:
                continue
            memory = memoryview(destination.detach().view(torch.uint8).numpy())
            size = location.dtype.itemsize
            for source, target, length, count, source_stride, target_stride in read.runs.rows():
                if length * count * size < self.WORTH:
                    continue
                begin = target * size
                end = (target + length) * size
                if count == 1:
                    crc = self.add_piece(location, source * size, memory[begin:end])
                    pieces.append((read.target, (begin, end, crc)))
                elif source_stride == length:
                    rows = numpy.ndarray((count,), f"V{length * size}", memory, begin, (target_stride * size,))
                    self._store_piece(location, source * size, rows.nbytes, _checksum_of_rows(rows))
        return pieces

    def rest(self) -> list[Callable[[], None]]:
        """Return functions that read the missing pieces of incomplete records, and raise as `add_piece` does."""
        with self._lock:
            return [partial(self._finish, record) for record in self._waiting.values()]

    def _finish(self, record: _PendingRecord) -> None:
        if not record.pieces or not record.is_intact(record.read):
            record.verify()  # raises an error with the position, or pieces overlapped
        self._add_verified(record.whole, record.part)


class LenientChecksums(Checksums):
    """Verifies checksums of data that is read for another purpose, without raising errors.

    Records that are not in `verified` may be damaged, or were read in pieces that are too small; the caller must check
    them.
    """

    def add_records(self, location: TensorLocation, archive: TorchArchive, names: Sequence[str]) -> None:
        """Register records of an archive."""
        with suppress(UnreadableCheckpointError):
            super().add_records(location, archive, names)

    def add_array(self, location: TensorLocation, array: RawArray) -> None:
        """Register a raw array."""
        with suppress(UnreadableCheckpointError):
            super().add_array(location, array)

    def add_plan(
        self, plan: Plan, destinations: Sequence[torch.Tensor], locate: Callable[[Extent], TensorLocation]
    ) -> list[tuple[int, Piece]]:
        """Add the large pieces that a plan has just read."""
        with suppress(UnreadableCheckpointError):
            return super().add_plan(plan, destinations, locate)
        return []


def _checksum_of_rows(rows: NDArray[numpy.void]) -> int:
    """Return the CRC-32 of the bytes of a matrix, whose rows need not be adjacent in memory."""
    at_once = max(1, _ROWS_BYTES // rows.itemsize)
    crc = 0
    for first in range(0, len(rows), at_once):
        crc = crc32(rows[first : first + at_once].tobytes(), crc)
    return crc


def verify_array(reader: FolderReader, array: RawArray) -> None:
    """Compare the CRC-32 of a raw array with its stored one, if there is one.

    Raises:
        UnreadableCheckpointError: the checksum differs.
    """
    if array.crc is not None and reader.checksum(array.file, array.offset, array.length) != array.crc:
        raise UnreadableCheckpointError(
            "an array of the checkpoint is damaged: its checksum differs",
            where=f"{reader.folder / array.file} at byte {array.offset}",
        )


def _verify_record(reader: FolderReader, archive: ByteRange, name: str) -> None:
    """Verify a record. Unlike a method of the archive, it does not keep the directory in memory."""
    TorchArchive(reader, *archive).verify_checksums(only=name)
