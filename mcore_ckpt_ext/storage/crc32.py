"""Computes CRC-32 checksums, and combines those of adjacent pieces.

The CRC-32 of two adjacent pieces follows from the CRC-32 of each: bits are the coefficients of polynomials over GF(2),
and appending `n` bytes multiplies by x^8n modulo the generator (zlib 1.2.12 and later, `crc32_combine`, crc32.c).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache

try:
    # isal uses carry-less multiplication: 13 GB/s, zlib's tables reach 2 GB/s (measured). Like zlib, it releases the
    # GIL (`isal_zlib_crc32`, isal_zlibmodule.c, 1.9: from 5 KiB on).
    from isal.isal_zlib import crc32
except ImportError:  # this package was installed without its dependencies, as in framework images
    from zlib import crc32

__all__ = ["Piece", "combine_crc32", "crc32_from_pieces", "crc32"]

_GENERATOR = 0xEDB88320  # of zlib, zip and Ethernet; the highest bit is the coefficient of x^0
_ONE = 1 << 31

Piece = tuple[int, int, int]
"""A byte range: first byte, end, and CRC-32."""


def combine_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of bytes with CRC-32 `first`, followed by `length` bytes with CRC-32 `second`."""
    return _product(_shift(length), first) ^ second


def crc32_from_pieces(data: memoryview, known: Iterable[Piece] = (), crc: int = 0) -> int:
    """Return the CRC-32 of bytes, reusing the known CRC-32 of some pieces.

    Args:
        data: the bytes.
        known: pieces of `data` that do not overlap.
        crc: the CRC-32 of the bytes before `data`.
    """
    done = 0
    for start, stop, piece in sorted(known):
        crc = combine_crc32(crc32(data[done:start], crc), piece, stop - start)
        done = stop
    return crc32(data[done:], crc)


def _product(first: int, second: int) -> int:
    product = 0
    while first:
        if first & _ONE:
            product ^= second
        first = first << 1 & 0xFFFFFFFF
        second = second >> 1 ^ (_GENERATOR if second & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """Return x^(8 * length) modulo the generator."""
    power = _ONE
    bit = 0
    while length:
        if length & 1:
            power = _product(_square(bit), power)
        length = length >> 1
        bit = bit + 1
    return power


@cache
def _square(bit: int) -> int:
    """Return x^(8 * 2**bit) modulo the generator."""
    if bit == 0:
        return _ONE >> 8
    return _product(_square(bit - 1), _square(bit - 1))
