"""Reads torch archives (files of `torch.save`), which may be embedded in a `.distcp` file.

An archive is an uncompressed zip: `data.pkl` describes the object, and each storage is a record `data/<key>`. A plain
central directory is parsed by this package, any other by the standard library. So the elements of a tensor are plain
bytes of the outer file.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import IO, Any, cast

from mcore_ckpt_ext.errors import ContentError, UnreadableCheckpointError, UnsupportedCheckpointError, quantity, shorten
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.storage.budget import Budget
from mcore_ckpt_ext.storage.crc32 import crc32
from mcore_ckpt_ext.storage.dtypes import tensor_of
from mcore_ckpt_ext.storage.expansion import check_expansion
from mcore_ckpt_ext.storage.files import FolderReader, Window, cut_short
from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from mcore_ckpt_ext.storage.tensor_location import ArchiveTemplate, TensorLocation
from mcore_ckpt_ext.storage.tensor_reference import Float8Reference, TensorReference
from mcore_ckpt_ext.storage.zip_directory import Record, plain_directory

# Local file header of a record (PKWARE APPNOTE 4.3.7): 30 bytes, then the name, then the extra field.
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
END_BYTES = 4096
"""Bytes that are read first at each end of an archive."""
_SHORT = 64
_TENSOR = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n"
_SMALL = 512
_STEPS_TO_KEEP = 16  # storing a byte costs more than visiting it
_BYTE_ORDER = "byteorder"
_DESCRIBING = ("data.pkl", _BYTE_ORDER)
ByteRange = tuple[str, int, int]
"""Consecutive bytes of a file, such as an archive or a raw array: the file, the first byte, the length."""
WRITER_RECORD = ".data/writer"
"""The record with the writing program, next to torch's `.data/serialization_id`; torch reads neither."""


class TorchArchive:
    """The archive that occupies `length` bytes at `offset` of a file.

    Attributes:
        has_checksums: the records have checksums. torch writes zeros instead after
            `torch.serialization.set_crc32_options(False)` (since 2.6); no archive has only zeros otherwise, as the
            record `version` is the same in all.
    """

    def __init__(self, reader: FolderReader, file: str, offset: int = 0, length: int | None = None) -> None:
        """Read the archive's directory.

        Raises:
            UnreadableCheckpointError: there is no complete archive at this position.
        """
        self._reader = reader
        self._file = file
        self._offset = offset
        size = reader.size(file)
        self._length = size - offset if length is None else length
        if offset < 0 or self._length < 0 or offset + self._length > size:
            raise cut_short(self.where, size, offset + self._length)
        self._ends = self._read_ends()
        try:
            self._directory = plain_directory(self._ends[-1][1], self._length)
            self._records = _unambiguous(self._directory.records if self._directory else self._records_by_zipfile())
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError, struct.error) as error:
            raise UnreadableCheckpointError(
                "a record of the checkpoint is not a torch archive: it is damaged, or its metadata "
                "belongs to other files",
                found=str(error),
                where=self.where,
            ) from error

        self.has_checksums = any(record.CRC for record in self._records.values())

    def _records_by_zipfile(self) -> list[Record]:
        with zipfile.ZipFile(cast("IO[bytes]", Window(self._read, self._length))) as archive:
            return [
                Record(record.filename, record.header_offset, record.file_size, record.CRC, record.compress_type)
                for record in archive.infolist()
            ]

    def _read_ends(self) -> tuple[tuple[int, bytes], ...]:
        """Return the first and the last bytes of the archive, each with their position."""
        if self._length <= 2 * END_BYTES:
            return ((0, self._reader.read(self._file, self._offset, self._length)),)
        tail = self._length - END_BYTES
        front, back = (self._reader.read(self._file, self._offset + at, END_BYTES) for at in (0, tail))
        return (0, front), (tail, back)

    def _read(self, position: int, count: int) -> bytes:
        """Return `count` bytes from `position` of the archive."""
        for begin, data in self._ends:
            if begin <= position and position + count <= begin + len(data):
                return data[position - begin : position - begin + count]
        return self._reader.read(self._file, self._offset + position, count)

    @property
    def byte_range(self) -> ByteRange:
        """The bytes of the archive in its file."""
        return self._file, self._offset, self._length

    @property
    def names(self) -> Sequence[str]:
        """Names of the records."""
        return list(self._records)

    @property
    def storage_checksums(self) -> tuple[tuple[int, int], ...] | None:
        """Size and checksum of each storage; if one differs, the archives have different elements.

        None without checksums.
        """
        if not self.has_checksums:
            return None
        storages = (record for name, record in self._records.items() if name.startswith("data/"))
        return tuple((record.file_size, record.CRC) for record in storages)

    @property
    def where(self) -> str:
        """The file and the position of the archive in it, for error messages."""
        return f"{self._reader.folder}/{self._file} at byte {self._offset}"

    def load(self) -> Any:
        """Unpickle the archived object safely; tensors become `TensorReference` objects."""
        start, record = self._record("data.pkl")
        self._check_byte_order()
        data = self._read(start, record.file_size)
        if self.has_checksums and crc32(data) != record.CRC:
            raise self._damage("data.pkl")
        if data.startswith(_TENSOR) and len(data) <= _SMALL and (tensor := _tensor_of(data)) is not None:
            return tensor
        loaded = safe_loads(data, self.where)
        check_expansion(loaded, len(data), self.where)
        return loaded

    def _check_byte_order(self) -> None:
        """Refuse archives of the other byte order, which torch converts (`torch/serialization.py`, `_load`)."""
        if _BYTE_ORDER not in self._records:
            return
        start, record = self._record(_BYTE_ORDER)
        byte_order = self._read(start, min(record.file_size, _SHORT))
        if byte_order != b"little":
            raise UnsupportedCheckpointError(
                "a record was written by a machine with another order of bytes",
                found=shorten(byte_order.decode(errors="replace")),
                expected="little",
                where=self.where,
                hint="load it on such a machine, and save it with torch.serialization.set_default_load_endianness",
            )

    def locate(self, tensor: TensorReference) -> TensorLocation:
        """Return the location of a tensor's elements.

        Raises:
            UnreadableCheckpointError: the tensor is not contiguous, or is larger than the record of its storage.
        """
        start, record = self._record(f"data/{tensor.storage.key}")
        dtype = tensor.storage.dtype
        location = TensorLocation(
            self._file, self._offset + start + tensor.offset * dtype.itemsize, dtype, tensor.shape
        )
        end = (tensor.offset + location.numel) * dtype.itemsize
        if not tensor.is_contiguous or tensor.offset < 0 or min(tensor.shape, default=0) < 0 or end > record.file_size:
            raise UnreadableCheckpointError(
                "a tensor does not fit its record",
                found=f"a record of {quantity(record.file_size, 'byte')}",
                expected=f"shape {tensor.shape}, strides {tensor.stride}, {dtype} from element {tensor.offset}",
                where=self.where,
            )
        return location

    def locate_scaled(self, tensor: Float8Reference) -> TensorLocation:
        """Return the location of an fp8 tensor's elements.

        Raises:
            UnreadableCheckpointError: the elements or their scale are missing, or the scale is not finite.
        """
        (scale,) = self.with_values([tensor.scale])
        if not math.isfinite(scale):
            raise UnreadableCheckpointError("the scale of an fp8 tensor is not a number", where=self.where)
        return replace(self.locate(tensor.data), dtype=tensor.fp8_dtype, scaled=(float(scale), tensor.dtype))

    def template(self, tensor: TensorReference, location: TensorLocation) -> ArchiveTemplate | None:
        """Return a template for other archives that contain only a tensor of the same shape and dtype.

        Returns:
            None if the description of the tensor is not within the first bytes, or the directory is not plain.
        """
        front = self._ends[0][1]
        start = location.offset - self._offset
        described = max((self._records[name].header_offset for name in _DESCRIBING if name in self._records), default=0)
        if self._directory is None or tensor.offset or not described < start <= len(front):
            return None
        begin = self._directory.begin
        directory = self._ends[-1][1][begin:]
        marks = [0, *(position - begin for position in self._directory.checksums), len(directory)]
        kept = [slice(a + 4 * bool(number), b) for number, (a, b) in enumerate(pairwise(marks))]
        return ArchiveTemplate(self._length, front[:start], directory, kept, location.dtype, location.shape)

    def with_values(self, tree: Any) -> Any:
        """Read the tensors of a small object that `load` returned, such as the state of a gradient scaler.

        A tensor that is referenced twice is read once and remains one tensor. Checksums are compared.

        Raises:
            UnreadableCheckpointError: a tensor is missing or damaged.
            OverBudgetError: the tensors are many views of the same elements.
        """
        budget = Budget(self._length, self.where)
        read: dict[TensorReference, torch.Tensor] = {}
        verified: set[str] = set()

        def values(node: Any) -> Any:
            if isinstance(node, TensorReference):
                if node not in read:
                    location = self.locate(node)
                    if node.storage.key not in verified:
                        self.verify_checksums(only=f"data/{node.storage.key}")
                        verified.add(node.storage.key)
                    read[node] = self._values(location, budget)
                return read[node]
            if isinstance(node, dict):
                return {key: values(value) for key, value in node.items()}
            if isinstance(node, list):
                return [values(value) for value in node]
            if type(node) is tuple:
                return tuple(values(value) for value in node)
            return node

        return values(tree)

    def _values(self, location: TensorLocation, budget: Budget) -> torch.Tensor:
        nbytes = location.numel * location.dtype.itemsize
        budget.spend(_STEPS_TO_KEEP * nbytes, "copies of its tensors")
        data = self._reader.read(location.file, location.offset, nbytes)
        return tensor_of(data, location.dtype).reshape(location.shape)

    def writer(self) -> str | None:
        """Return the writing program that the archive names (`plan_archive`); None if it names none."""
        if WRITER_RECORD not in self._records:
            return None
        start, record = self._record(WRITER_RECORD)
        return self._read(start, min(record.file_size, _SHORT)).decode(errors="replace")

    def verify_checksums(self, only: str | None = None) -> None:
        """Compare the CRC-32 of all records, or of one, with the directory, if it has checksums.

        Raises:
            UnreadableCheckpointError: a record differs.
        """
        if not self.has_checksums:
            return
        for name in self._records if only is None else (only,):
            begin, size, expected = self.find_record(name)
            if self._reader.checksum(self._file, begin, size) != expected:
                raise self._damage(name)

    def find_record(self, name: str) -> tuple[int, int, int]:
        """Return the first byte of a record in the file, its size, and its CRC-32 from the directory.

        Raises:
            UnreadableCheckpointError: the record does not exist, or lies outside of the archive.
        """
        start, record = self._record(name)
        return self._offset + start, record.file_size, record.CRC

    def _damage(self, record: str) -> UnreadableCheckpointError:
        return UnreadableCheckpointError(
            "a record of the checkpoint is damaged: its checksum differs", where=f"{self.where}, record {record}"
        )

    def _record(self, name: str) -> tuple[int, Record]:
        """Return the position of a record's content in the archive, and its directory entry."""
        record = self._records.get(name)
        if record is None or record.compress_type != zipfile.ZIP_STORED:
            raise UnreadableCheckpointError(
                "a torch archive lacks a record", expected=name, found=sorted(self._records)[:8], where=self.where
            )
        header = self._read(record.header_offset, _LOCAL_HEADER.size)
        signature, *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        start = record.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if signature != b"PK\x03\x04" or start + record.file_size > self._length:
            raise UnreadableCheckpointError("a record lies outside of its archive", where=f"{self.where}, {name}")
        return start, record


@lru_cache(maxsize=4096)
def _tensor_of(data: bytes) -> TensorReference | None:
    """Load a small pickle of a tensor; cached, because tensors of one shape have equal pickles."""
    with suppress(ContentError):  # the caller loads it again, and reports the file
        tensor = safe_loads(data, "")
        if isinstance(tensor, TensorReference):
            return tensor
    return None


def _unambiguous(records: list[Record]) -> dict[str, Record]:
    """Return the records by name, without the archive's top folder.

    Raises:
        ValueError: readers could choose different records for one name. torch uses the first record of a name in the
            top folder of the first record, and ignores case (miniz, `mz_zip_reader_locate_file_v2`).
    """
    by_name = {name_in_archive(record.filename): record for record in records}
    tops = {record.filename.partition("/")[0] for record in records}
    if len({name.casefold() for name in by_name}) != len(records) or len(tops) > 1:
        raise ValueError("it has more than one record of a name, or more than one top folder")
    return by_name


def name_in_archive(record: str) -> str:
    """Return a record's name without the archive's top folder: `data/0` for `archive/data/0`."""
    return record.partition("/")[2]
