"""Finds the copies of this package that processes of an environment could import."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlparse

_DIRECT_URL = "direct_url.json"  # PEP 610; pip writes it for installations from a folder


def installed_copies(package: str) -> dict[Path, str | None]:
    """Return the folders of a package on the path, each with the version of its distribution.

    A folder on the path without a distribution, such as a clone in PYTHONPATH, has the version None.
    """
    copies: dict[Path, str | None] = {}
    for entry in sys.path:
        folder = Path(entry or ".") / package
        if (folder / "__init__.py").is_file():
            copies[folder.resolve()] = None
    for distribution in distributions(name=package):
        for folder in _folders(distribution, package):
            if (folder / "__init__.py").is_file():
                copies[folder.resolve()] = distribution.version
    return copies


def _folders(distribution: Distribution, package: str) -> Iterator[Path]:
    """Yield where a distribution may have its package: next to its metadata, or where it was built."""
    yield Path(str(distribution.locate_file(package)))
    url = urlparse(str(json.loads(distribution.read_text(_DIRECT_URL) or "{}").get("url", "")))
    if url.scheme == "file":
        yield Path(unquote(url.path)) / package
