"""Torch archives (what `torch.save` writes), alone in a file or embedded in a `.distcp`.

An archive is an uncompressed zip: `data.pkl` describes the object, each storage is a record `data/<key>`. The
central directory is read here where it is plain, else by the standard library; a tensor's elements are then plain
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

from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError, UnsupportedCheckpointError, shorten
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.storage.budget import Budget
from mcore_ckpt_ext.storage.crc32 import crc32
from mcore_ckpt_ext.storage.expansion import check_expansion
from mcore_ckpt_ext.storage.files import FolderReader, Window, cut_short
from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from mcore_ckpt_ext.storage.tensor_location import ArchiveTemplate, TensorLocation
from mcore_ckpt_ext.storage.tensor_reference import Float8Reference, TensorReference
from mcore_ckpt_ext.storage.zip_directory import Member, plain_directory

# Local file header of a zip member (PKWARE APPNOTE 4.3.7): 30 bytes, then the name, then the extra field.
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_END = 4096
_SHORT = 64
_TENSOR, _SMALL = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n", 512
_STEPS_TO_KEEP = 16  # keeping a byte costs more than looking at it
_BYTE_ORDER = "byteorder"
_DESCRIBING = ("data.pkl", _BYTE_ORDER)
WRITER_MEMBER = ".data/writer"
"""It lies beside torch's `.data/serialization_id`; readers look at neither."""


class TorchArchive:
    """The archive that occupies `length` bytes at `offset` of a file."""

    def __init__(self, reader: FolderReader, file: str, offset: int = 0, length: int | None = None) -> None:
        """Read the archive's directory.

        Raises:
            UnreadableCheckpointError: there is no whole archive at that place.
        """
        self._reader, self._file, self._offset = reader, file, offset
        size = reader.size(file)
        self._length = size - offset if length is None else length
        if offset < 0 or self._length < 0 or offset + self._length > size:
            raise cut_short(self.where, size, offset + self._length)
        self._ends = self._read_ends()
        try:
            self._directory = plain_directory(self._ends[-1][1], self._length)
            self._members = _unambiguous(self._directory.members if self._directory else self._by_zipfile())
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError, struct.error) as error:
            raise UnreadableCheckpointError(
                "a record of the checkpoint is not a torch archive: it is damaged, or its metadata "
                "belongs to other files",
                found=str(error),
                where=self.where,
            ) from error

    def _by_zipfile(self) -> list[Member]:
        with zipfile.ZipFile(cast("IO[bytes]", Window(self._read, self._length))) as archive:
            return [
                Member(info.filename, info.header_offset, info.file_size, info.CRC, info.compress_type)
                for info in archive.infolist()
            ]

    def _read_ends(self) -> tuple[tuple[int, bytes], ...]:
        """What lies at both ends, and where: a small object is described at the front, the directory is at the back."""
        if self._length <= 2 * _END:
            return ((0, self._reader.read(self._file, self._offset, self._length)),)
        tail = self._length - _END
        front, back = (self._reader.read(self._file, self._offset + at, _END) for at in (0, tail))
        return (0, front), (tail, back)

    def _read(self, position: int, count: int) -> bytes:
        """`count` bytes from `position` of the archive."""
        for begin, data in self._ends:
            if begin <= position and position + count <= begin + len(data):
                return data[position - begin : position - begin + count]
        return self._reader.read(self._file, self._offset + position, count)

    @property
    def place(self) -> tuple[str, int, int]:
        """The file, its first byte there, and its length."""
        return self._file, self._offset, self._length

    @property
    def names(self) -> Sequence[str]:
        """Names of the records."""
        return list(self._members)

    @property
    def content(self) -> tuple[tuple[int, int], ...]:
        """Size and checksum of each of its storages: archives that differ in one hold other numbers."""
        storages = (member for name, member in self._members.items() if name.startswith("data/"))
        return tuple((member.file_size, member.CRC) for member in storages)

    @property
    def where(self) -> str:
        """The file and the place in it, for error messages."""
        return f"{self._reader.folder}/{self._file} at byte {self._offset}"

    def load(self) -> Any:
        """The archived object, unpickled safely; tensors as `TensorReference`."""
        start, info = self._record("data.pkl")
        self._check_byte_order()
        data = self._read(start, info.file_size)
        if crc32(data) != info.CRC:
            raise self._damaged("data.pkl")
        if data.startswith(_TENSOR) and len(data) <= _SMALL and (tensor := _tensor_of(data)) is not None:
            return tensor
        loaded = safe_loads(data, self.where)
        check_expansion(loaded, len(data), self.where)
        return loaded

    def _check_byte_order(self) -> None:
        """Torch swaps the bytes of what a machine of the other order wrote (`torch/serialization.py`, `_load`)."""
        if _BYTE_ORDER not in self._members:
            return
        start, info = self._record(_BYTE_ORDER)
        found = self._read(start, min(info.file_size, _SHORT))
        if found != b"little":
            raise UnsupportedCheckpointError(
                "a record was written by a machine with another order of bytes",
                found=shorten(found.decode(errors="replace")),
                expected="little",
                where=self.where,
                hint="load it on such a machine, and save it with torch.serialization.set_default_load_endianness",
            )

    def payload(self, tensor: TensorReference) -> TensorLocation:
        """Where the elements of a tensor of this archive lie.

        Raises:
            UnreadableCheckpointError: it is not contiguous, or larger than its storage's record.
        """
        start, info = self._record(f"data/{tensor.storage.key}")
        dtype = tensor.storage.dtype
        found = TensorLocation(self._file, self._offset + start + tensor.offset * dtype.itemsize, dtype, tensor.shape)
        end = (tensor.offset + found.numel) * dtype.itemsize
        if not tensor.is_contiguous or tensor.offset < 0 or min(tensor.shape, default=0) < 0 or end > info.file_size:
            raise UnreadableCheckpointError(
                "a tensor does not fit its record",
                found=f"a record of {info.file_size} bytes",
                expected=f"shape {tensor.shape}, strides {tensor.stride}, {dtype} from element {tensor.offset}",
                where=self.where,
            )
        return found

    def scaled_payload(self, tensor: Float8Reference) -> TensorLocation:
        """Where the numbers of an fp8 tensor of this archive lie.

        Raises:
            UnreadableCheckpointError: they are not there, or their scale is not.
        """
        (scale,) = self.with_values([tensor.scale])
        if not math.isfinite(scale):
            raise UnreadableCheckpointError("the scale of an fp8 tensor is not a number", where=self.where)
        return replace(self.payload(tensor.data), dtype=tensor.fp8_dtype, scaled=(float(scale), tensor.dtype))

    def stencil(self, tensor: TensorReference, payload: TensorLocation) -> ArchiveTemplate | None:
        """What other archives have in common with this one, of nothing but a tensor, if they are of one like it.

        Returns:
            None where too much of it lies elsewhere than at the two ends that have been read.
        """
        front, start = self._ends[0][1], payload.offset - self._offset
        described = max((self._members[name].header_offset for name in _DESCRIBING if name in self._members), default=0)
        if self._directory is None or tensor.offset or not described < start <= len(front):
            return None
        begin = self._directory.begin
        directory = self._ends[-1][1][begin:]
        marks = [0, *(place - begin for place in self._directory.checksums), len(directory)]
        kept = [slice(a + 4 * bool(number), b) for number, (a, b) in enumerate(pairwise(marks))]
        return ArchiveTemplate(self._length, front[:start], directory, kept, payload.dtype, payload.shape)

    def with_values(self, tree: Any) -> Any:
        """A small object of this archive, as `load` gives it, with its tensors read: a gradient scaler's scale.

        What the archive refers to twice is read once, and is one tensor; nobody else compares these checksums.

        Raises:
            UnreadableCheckpointError: a tensor is not there, or is damaged.
            OverBudgetError: its tensors are many views of the same elements.
        """
        budget = Budget(self._length, self.where)
        read: dict[TensorReference, torch.Tensor] = {}
        verified: set[str] = set()

        def values(node: Any) -> Any:
            if isinstance(node, TensorReference):
                if node not in read:
                    place = self.payload(node)
                    if node.storage.key not in verified:
                        self.verify_checksums(only=f"data/{node.storage.key}")
                        verified.add(node.storage.key)
                    read[node] = self._values(place, budget)
                return read[node]
            if isinstance(node, dict):
                return {key: values(value) for key, value in node.items()}
            if isinstance(node, list):
                return [values(value) for value in node]
            if type(node) is tuple:
                return tuple(values(value) for value in node)
            return node

        return values(tree)

    def _values(self, place: TensorLocation, budget: Budget) -> torch.Tensor:
        nbytes = place.numel * place.dtype.itemsize
        budget.spend(_STEPS_TO_KEEP * nbytes, "copies of its tensors")
        data = self._reader.read(place.file, place.offset, nbytes)
        if not data:  # torch.frombuffer refuses an empty buffer
            return torch.empty(0, dtype=place.dtype.torch).reshape(place.shape)
        return torch.frombuffer(bytearray(data), dtype=place.dtype.torch).reshape(place.shape)

    def writer(self) -> str | None:
        """Who claims to have written it (`plan_archive`)."""
        if WRITER_MEMBER not in self._members:
            return None
        start, info = self._record(WRITER_MEMBER)
        return self._read(start, min(info.file_size, _SHORT)).decode(errors="replace")

    def verify_checksums(self, only: str | None = None) -> None:
        """Compare the CRC-32 of every record, or of one, with the directory.

        Raises:
            UnreadableCheckpointError: a record differs.
        """
        for name in self._members if only is None else (only,):
            begin, size, expected = self.place_of(name)
            if self._reader.checksum(self._file, begin, size) != expected:
                raise self._damaged(name)

    def place_of(self, name: str) -> tuple[int, int, int]:
        """The first byte of a record in the file, its size, and its CRC-32 in the directory.

        Raises:
            UnreadableCheckpointError: there is none, or it is not within the archive.
        """
        start, info = self._record(name)
        return self._offset + start, info.file_size, info.CRC

    def _damaged(self, record: str) -> UnreadableCheckpointError:
        return UnreadableCheckpointError(
            "a record of the checkpoint is damaged: its checksum differs", where=f"{self.where}, record {record}"
        )

    def _record(self, name: str) -> tuple[int, Member]:
        """Position in the archive and directory entry of a record; the local header tells how long itself is."""
        info = self._members.get(name)
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise UnreadableCheckpointError(
                "a torch archive lacks a record", expected=name, found=sorted(self._members)[:8], where=self.where
            )
        header = self._read(info.header_offset, _LOCAL_HEADER.size)
        signature, *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if signature != b"PK\x03\x04" or start + info.file_size > self._length:
            raise UnreadableCheckpointError("a record lies outside of its archive", where=f"{self.where}, {name}")
        return start, info


@lru_cache(maxsize=4096)
def _tensor_of(data: bytes) -> TensorReference | None:
    """What a small pickle of nothing but a tensor makes: remembered, for tensors of one shape have equal pickles."""
    with suppress(CheckpointError):  # the caller loads it again, and says where it is
        tensor = safe_loads(data, "")
        if isinstance(tensor, TensorReference):
            return tensor
    return None


def _unambiguous(members: list[Member]) -> dict[str, Member]:
    """The records by name, without the archive's own top folder.

    Raises:
        ValueError: two readers could take different records for the same: torch takes the first of a name, whatever its
            case (miniz, `mz_zip_reader_locate_file_v2`), below the top folder of the first record.
    """
    found = {name_in_archive(info.filename): info for info in members}
    if len({name.casefold() for name in found}) != len(members) or len({_top(info) for info in members}) > 1:
        raise ValueError("it has more than one record of a name, or more than one top folder")
    return found


def _top(member: Member) -> str:
    return member.filename.partition("/")[0]


def name_in_archive(member: str) -> str:
    """A record's name without the archive's own top folder (`archive/data/0` is `data/0`)."""
    return member.partition("/")[2]
