"""Parses sizes in bytes and counts."""

from __future__ import annotations

import argparse
import re

_DIGITS = 15
# Fewer bytes than any option can mean: a user who writes 80 means GiB.
_LEAST_BYTES = 1 << 10
_SIZE = re.compile(rf"^(\d{{1,{_DIGITS}}}(?:\.\d{{1,{_DIGITS}}})?)\s*([kmgtp]?)(i?b)?$", re.IGNORECASE | re.ASCII)
_EXPONENTS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(text: str) -> int:
    """Parse a size such as `500MB`, `4GiB` or a number of bytes; units are powers of 1024.

    Raises:
        argparse.ArgumentTypeError: the text is not a size.
    """
    return _parse(text, 1024)


def parse_file_size(text: str) -> int:
    """Parse a size, where `5GB` is 5 * 1000^3 bytes, as in Hugging Face, and `5GiB` is 5 * 1024^3 bytes."""
    return _parse(text, 1024 if "i" in text.lower() else 1000)


def _parse(text: str, unit: int) -> int:
    match = _SIZE.match(text.strip())
    size = int(float(match[1]) * unit ** _EXPONENTS[match[2].lower()]) if match else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size; write for example 4GiB")
    if size < _LEAST_BYTES and match and not match[2] and not match[3]:
        raise argparse.ArgumentTypeError(f"{text!r} has no unit, and would be bytes; write for example {text}GiB")
    return size


def parse_count(text: str) -> int:
    """Parse a whole number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of 1 or more")
    return int(text)
