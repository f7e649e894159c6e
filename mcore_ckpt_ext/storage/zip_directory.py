"""The directory of a plain zip archive, as `torch.save` writes it: the standard library takes five times as long.

A checkpoint is ten thousand archives of half a dozen records each. What is not plain, the caller gives to `zipfile`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# PKWARE APPNOTE 4.3.12, 4.3.16, 4.3.14 and 4.3.15; torch always writes the latter two.
_ENTRY = struct.Struct("<4s4B4H3I5H2I")
_CHECKSUM = 16
_END = struct.Struct("<4s4H2IH")
_LARGE_END = struct.Struct("<4sQ2H2I4Q4s1I1Q1I")
_ELSEWHERE = 0xFFFFFFFF  # the number is in the extra field
_ENCRYPTED_OR_PATCHED = 0x61


class Member(NamedTuple):
    """A record of an archive, by the names that `zipfile.ZipInfo` has for them."""

    filename: str
    header_offset: int
    file_size: int
    CRC: int
    compress_type: int


class Directory(NamedTuple):
    """A plain directory: its records, where it begins in the last bytes, and where each checksum stands in them."""

    members: list[Member]
    begin: int
    checksums: list[int]


def plain_directory(tail: bytes, length: int) -> Directory | None:
    """The records of an archive.

    Args:
        tail: its last bytes.
        length: its length in bytes.

    Returns:
        None where the directory is not in `tail`, or is not plain: compressed or encrypted records, comments, extra
        fields, several disks, bytes before the first record, names beyond ASCII; or where it contradicts itself.
    """
    end = _end_of_entries(tail, length)
    if end is None:
        return None
    position, last, entries = end
    members, begin, checksums = [], position, []
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
        members.append(Member(name.decode("ascii"), fields[18], unpacked, checksum, 0))
    return Directory(members, begin, checksums) if members and position == last else None


def _end_of_entries(tail: bytes, length: int) -> tuple[int, int, int] | None:
    """Where in `tail` the entries begin and end, and how many there are."""
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
