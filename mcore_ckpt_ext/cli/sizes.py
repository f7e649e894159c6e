"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import argparse
import re

_DIGITS = 15
_SIZE = re.compile(rf"^(\d{{1,{_DIGITS}}}(?:\.\d{{1,{_DIGITS}}})?)\s*([kmgtp]?)(i?b)?$", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes from `500MB`, `4GiB` or a plain number; units count in powers of 1024.

    Raises:
        argparse.ArgumentTypeError: it is not a size.
    """
    return _parsed(text, 1024)


def parse_file_size(text: str) -> int:
    """Like `parse_size`, but `5GB` is five times 1000^3, as Hugging Face counts; `5GiB` is five times 1024^3."""
    return _parsed(text, 1024 if "i" in text.lower() else 1000)


def _parsed(text: str, unit: int) -> int:
    match = _SIZE.match(text.strip())
    size = int(float(match[1]) * unit ** " kmgtp".index(match[2].lower() or " ")) if match else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size; write for example 4GiB")
    return size


def parse_count(text: str) -> int:
    """A whole number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of 1 or more")
    return int(text)
