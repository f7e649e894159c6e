"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import argparse
import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?b)?$", re.IGNORECASE)


def readable(size: int) -> str:
    """A size with three digits and a unit: `1.50 GiB`."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.{max(0, 3 - len(str(int(value))))}f} {_UNITS[unit]}"


def parse_size(text: str) -> int:
    """Bytes from `500MB`, `4GiB` or a plain number; units count in powers of 1024.

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    return _parsed(text, 1024)


def parse_file_size(text: str) -> int:
    """As `parse_size`, but `5GB` is five times 1000^3, as Hugging Face counts; `5GiB` is five times 1024^3."""
    return _parsed(text, 1024 if "i" in text.lower() else 1000)


def _parsed(text: str, unit: int) -> int:
    match = _SIZE.match(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 4GiB")
    return int(float(match[1]) * unit ** " kmgtp".index(match[2].lower() or " "))
