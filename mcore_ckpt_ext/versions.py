"""Releases of Megatron Core, by the two numbers that its formats depend on."""

from __future__ import annotations

import re
from typing import NamedTuple

_VERSION = re.compile(r"(?:core_)?v?(\d{1,4})\.(\d{1,4})(?!\w)", re.ASCII)


class Version(NamedTuple):
    """Major and minor number; compares with any pair of numbers."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OLDEST, NEWEST = Version(0, 7), Version(0, 19)
KNOWN: tuple[Version, ...] = tuple(Version(0, minor) for minor in range(OLDEST.minor, NEWEST.minor + 1))


def parse_version(text: object) -> Version | None:
    """The release that a text begins with (`0.16.1`, `core_v0.12.1`, `0.20.0rc0+abc`); None where it is no version."""
    match = _VERSION.match(str(text))
    return Version(int(match[1]), int(match[2])) if match else None
