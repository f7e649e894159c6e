"""Plans torch archives before their tensors are available: the position of every byte.

`torch.save` writes an uncompressed zip archive (caffe2/serialize/inline_container.cc) with the records `data.pkl`,
`byteorder`, `data/<number>` for each storage, and `version`. An extra field in its local header aligns each record to
64 bytes. The zip format is described in PKWARE's APPNOTE, 4.3 and 4.5.3 (zip64).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.storage.crc32 import crc32
from mcore_ckpt_ext.storage.pickling import DeclaredTensor, Leaf, dumps
from mcore_ckpt_ext.storage.torch_archive import WRITER_RECORD

_ALIGNMENT = 64
_LIMIT_32 = 0xFFFFFFFF
_LIMIT_16 = 0xFFFF
_DATE = 1 << 5 | 1  # January 1, 1980, so that equal content results in equal files
_VERSION = 45  # zip64
_CRC_IN_LOCAL_HEADER = 14
_CRC_IN_DIRECTORY = 16


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A declared tensor: its `tag`, the offset of its elements, and the offsets of their CRC-32."""

    tag: object
    dtype: torch.dtype
    numel: int
    offset: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class ArchivePlan:
    """A planned archive of `length` bytes; offsets are relative to its start."""

    length: int
    literals: tuple[tuple[int, bytes], ...]
    tensors: tuple[PlannedTensor, ...]


def plan_archive(tree: Any, writer: str | None = None) -> ArchivePlan:
    """Plan the archive of a tree. Declared tensors are written later, other tensors are part of the plan.

    Args:
        tree: plain objects, placeholders, tensors and declared tensors.
        writer: name of the writing program, stored in a record of the archive.

    Raises:
        UnsupportedCheckpointError: an object in the tree may not be written.
    """
    pickle, leaves = dumps(tree)
    records: list[tuple[str, bytes | Leaf]] = [("data.pkl", pickle), ("byteorder", b"little")]
    records += [(f"data/{number}", leaf) for number, leaf in enumerate(leaves)]
    records += [("version", b"3\n")]
    records += [(WRITER_RECORD, writer.encode())] if writer else []
    return _Zip().plan(records)


def archive_of(tree: Any) -> bytes:
    """Return the bytes of a torch archive of a tree; equal trees give equal bytes."""
    draft = plan_archive(tree)
    content = bytearray(draft.length)
    for position, data in draft.literals:
        content[position : position + len(data)] = data
    return bytes(content)


def plan_tensor(declared: DeclaredTensor) -> ArchivePlan:
    """Plan the archive of a single tensor; for equal dtype and shape, plans differ only in the tag."""
    plan = _tensor_plan(declared.dtype, declared.shape)
    (tensor,) = plan.tensors
    return replace(plan, tensors=(replace(tensor, tag=declared.tag),))


@lru_cache(maxsize=4096)
def _tensor_plan(dtype: torch.dtype, shape: tuple[int, ...]) -> ArchivePlan:
    return plan_archive(DeclaredTensor(dtype, shape, None))


class _Zip:
    """Lays out the records of an archive one after the other, and then the zip directory."""

    def __init__(self) -> None:
        self._position = 0
        self._literals: list[tuple[int, bytes]] = []
        self._directory: list[bytes] = []
        self._declared: list[tuple[DeclaredTensor, int, int, int]] = []

    def plan(self, records: Sequence[tuple[str, bytes | Leaf]]) -> ArchivePlan:
        for name, content in records:
            self._add(f"archive/{name}".encode(), content)
        directory, crc_at = self._central_directory()
        tensors = tuple(
            PlannedTensor(leaf.tag, leaf.dtype, prod(leaf.shape), data_at, (local_crc, crc_at[entry]))
            for leaf, data_at, local_crc, entry in self._declared
        )
        self._literals.append((self._position, directory))
        return ArchivePlan(self._position + len(directory), tuple(self._literals), tensors)

    def _add(self, name: bytes, content: bytes | Leaf) -> None:
        if isinstance(content, DeclaredTensor):
            data = b""
            size = prod(content.shape) * content.dtype.itemsize
            crc = 0
        else:
            data = _bytes(content)
            size = len(data)
            crc = crc32(data)
        header_at = self._position
        large = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LIMIT_32 else b""
        fixed = header_at + 30 + len(name) + len(large) + 4
        padding = -fixed % _ALIGNMENT
        extra = large + struct.pack("<HH", 0x4246, padding) + b"Z" * padding  # "FB", as torch pads
        size_32 = min(size, _LIMIT_32)
        header = struct.pack(
            "<4s5H3I2H", b"PK\x03\x04", _VERSION, 0, 0, 0, _DATE, crc, size_32, size_32, len(name), len(extra)
        )
        head = header + name + extra
        data_at = header_at + len(head)
        self._literals.append((header_at, head + data))
        if isinstance(content, DeclaredTensor):
            crc_at = header_at + _CRC_IN_LOCAL_HEADER
            self._declared.append((content, data_at, crc_at, len(self._directory)))
        self._directory.append(_directory_entry(name, crc, size, header_at))
        self._position = data_at + size

    def _central_directory(self) -> tuple[bytes, list[int]]:
        """Return the directory with its end records, and the position of each entry's CRC-32."""
        starts = accumulate((len(entry) for entry in self._directory), initial=self._position)
        *crc_at, at = (start + _CRC_IN_DIRECTORY for start in starts)
        body = b"".join(self._directory)
        count = len(self._directory)
        at = at - _CRC_IN_DIRECTORY
        end = b""
        if self._position >= _LIMIT_32 or count >= _LIMIT_16 or len(body) >= _LIMIT_32:
            end += struct.pack(
                "<4sQ2H2I4Q", b"PK\x06\x06", 44, _VERSION, _VERSION, 0, 0, count, count, len(body), self._position
            )
            end += struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
        entries = min(count, _LIMIT_16)
        size = min(len(body), _LIMIT_32)
        start = min(self._position, _LIMIT_32)
        end += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, entries, entries, size, start, 0)
        return body + end, crc_at


def _directory_entry(name: bytes, crc: int, size: int, header_at: int) -> bytes:
    large = struct.pack("<QQ", size, size) if size >= _LIMIT_32 else b""
    if header_at >= _LIMIT_32:
        large += struct.pack("<Q", header_at)
    extra = struct.pack("<HH", 1, len(large)) + large if large else b""
    size_32 = min(size, _LIMIT_32)
    fields = (_VERSION, _VERSION, 0, 0, 0, _DATE, crc, size_32, size_32, len(name), len(extra), 0, 0, 0, 0)
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *fields, min(header_at, _LIMIT_32)) + name + extra


def _bytes(content: bytes | torch.Tensor) -> bytes:
    if isinstance(content, bytes):
        return content
    return content.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
