"""Releases of Megatron Core as (major, minor), the part of the version on which its formats depend."""

from __future__ import annotations

import re
from typing import NamedTuple

_VERSION = re.compile(r"(?:core_)?v?(\d{1,4})\.(\d{1,4})(?!\w)", re.ASCII)


class Version(NamedTuple):
    """A major and minor version number; compares with any pair of numbers."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OLDEST = Version(0, 7)
NEWEST = Version(0, 19)
KNOWN: tuple[Version, ...] = tuple(Version(0, minor) for minor in range(OLDEST.minor, NEWEST.minor + 1))


def parse_version(text: object) -> Version | None:
    """Parse the version at the start of a text: `0.16.1`, `core_v0.12.1`, `0.20.0rc0+abc`.

    Returns:
        The version, or None if the text does not begin with one.
    """
    match = _VERSION.match(str(text))
    return Version(int(match[1]), int(match[2])) if match else None


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    from importlib import metadata  # imported late, so that `import torch` with this package's plugin is fast

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
