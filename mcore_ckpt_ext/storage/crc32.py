"""The CRC-32 of bytes, and of bytes of which that of some pieces is known.

The CRC-32 of two pieces, one after the other, follows from those of the pieces: bits are polynomials over GF(2), and to
append `n` bytes is to multiply by x^8n modulo the generator (zlib 1.2.12 and later, `crc32_combine`, crc32.c).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache

try:
    # By carry-less products of the processor: 13 GB/s, where zlib's tables give 2 (measured). Other threads run
    # meanwhile, as they do with zlib's (`isal_zlib_crc32`, isal_zlibmodule.c, 1.9: from 5 KiB on).
    from isal.isal_zlib import crc32
except ImportError:  # installed without its dependencies, as images of frameworks are
    from zlib import crc32

__all__ = ["Piece", "appended", "checksum", "crc32"]

_GENERATOR = 0xEDB88320  # of zlib, zip and Ethernet; the bit of x^0 is the highest
_ONE = 1 << 31

Piece = tuple[int, int, int]
"""Of a stretch of bytes: where it begins, where it ends, and its CRC-32."""


def appended(first: int, second: int, length: int) -> int:
    """The CRC-32 of bytes with the CRC-32 `first`, and after them `length` bytes with `second`."""
    return _product(_shift(length), first) ^ second


def checksum(data: memoryview, known: Iterable[Piece] = (), crc: int = 0) -> int:
    """The CRC-32 of bytes, of which that of some pieces is known.

    Args:
        data: the bytes.
        known: pieces of them that do not overlap.
        crc: of what precedes them.
    """
    done = 0
    for start, stop, piece in sorted(known):
        crc = appended(crc32(data[done:start], crc), piece, stop - start)
        done = stop
    return crc32(data[done:], crc)


def _product(one: int, other: int) -> int:
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (_GENERATOR if other & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x^8n modulo the generator."""
    power, bit = _ONE, 0
    while length:
        if length & 1:
            power = _product(_square(bit), power)
        length, bit = length >> 1, bit + 1
    return power


@cache
def _square(bit: int) -> int:
    """The power of x by 8 times 2**bit, modulo the generator."""
    if bit == 0:
        return _ONE >> 8
    return _product(_square(bit - 1), _square(bit - 1))
