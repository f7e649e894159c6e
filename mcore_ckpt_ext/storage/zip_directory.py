"""Parses the directory of a plain zip archive, five times as fast as the standard library.

A checkpoint has ten thousand archives of about six records each, as `torch.save` writes them. For all other archives
the caller uses `zipfile`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zipfile import ZipFile, ZipInfo

# PKWARE APPNOTE 4.3.12, 4.3.16, 4.3.14 and 4.3.15; torch always writes the last two.
_ENTRY = struct.Struct("<4s4B4H3I5H2I")
_CHECKSUM = 16
_END = struct.Struct("<4s4H2IH")
_LARGE_END = struct.Struct("<4sQ2H2I4Q4s1I1Q1I")
_ELSEWHERE = 0xFFFFFFFF  # the number is stored in the extra field
_ENCRYPTED_OR_PATCHED = 0x61


class Record(NamedTuple):
    """A record of an archive; the fields are named as in `zipfile.ZipInfo`."""

    filename: str
    header_offset: int
    file_size: int
    CRC: int
    compress_type: int


class Directory(NamedTuple):
    """A plain directory: its records, its first byte and the position of each checksum in the last bytes."""

    records: list[Record]
    begin: int
    checksums: list[int]


def plain_directory(tail: bytes, length: int) -> Directory | None:
    """Return the directory of an archive.

    Args:
        tail: the last bytes of the archive.
        length: length of the archive in bytes.

    Returns:
        None if the directory is not in `tail`, contradicts itself, or is not plain: it has compressed or encrypted
        records, comments, extra fields, several disks, bytes before the first record, or names beyond ASCII.
    """
    end = _end_of_entries(tail, length)
    if end is None:
        return None
    position, last, entries = end
    records = []
    begin = position
    checksums = []
    for _ in range(entries):
        if position + _ENTRY.size > last:
            return None
        fields = _ENTRY.unpack_from(tail, position)
        checksum, packed, unpacked, name_length = fields[9:13]
        checksums.append(position + _CHECKSUM)
        position += _ENTRY.size + name_length
        name = tail[position - name_length : position]
        # Method, then extra field, comment and disk.
        is_plain = not (fields[6] or any(fields[13:16]) or fields[5] & _ENCRYPTED_OR_PATCHED) and packed == unpacked
        if fields[0] != b"PK\x01\x02" or not is_plain or _ELSEWHERE in (unpacked, fields[18]):
            return None
        if position > last or not name.isascii() or b"\0" in name or b"\\" in name:
            return None
        records.append(Record(name.decode("ascii"), fields[18], unpacked, checksum, 0))
    return Directory(records, begin, checksums) if records and position == last else None


def readable_records(archive: ZipFile) -> list[ZipInfo]:
    """Return the records of torch's archive so that all can be read.

    If it has no checksums (see `TorchArchive.has_checksums`), the standard library would refuse every record, unless
    it finds no `CRC` at all (`ZipExtFile.__init__`).
    """
    records = archive.infolist()
    if not any(record.CRC for record in records):
        for record in records:
            del record.CRC
    return records


def _end_of_entries(tail: bytes, length: int) -> tuple[int, int, int] | None:
    """Return start, end and number of the entries in `tail`; None if they are not plain."""
    last = len(tail) - _END.size
    if last < 0:
        return None
    signature, disk, first_disk, here, entries, size, offset, comment = _END.unpack_from(tail, last)
    if signature != b"PK\x05\x06" or disk or first_disk or here != entries or comment:
        return None
    if last >= _LARGE_END.size:
        large = _LARGE_END.unpack_from(tail, last - _LARGE_END.size)
        if large[10] == b"PK\x06\x07":
            last -= _LARGE_END.size
            at = length - len(tail) + last
            if (large[0], *large[4:10], *large[11:]) != (b"PK\x06\x06", 0, 0, here, entries, size, offset, 0, at, 1):
                return None
    begin = last - size
    return (begin, last, entries) if begin >= 0 and length - len(tail) + begin == offset else None
