"""Matches untrusted regular expressions, which may never end, under a time limit."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, shorten

_SECONDS = 2.0  # of processor time


def is_pattern(value: object) -> bool:
    """Return whether a value is a valid regular expression; raises as `match_pattern` does."""
    library = _library()
    try:
        return isinstance(value, str) and bool(library.compile(value))
    except library.error:
        return False


def match_pattern(pattern: str, name: str, *, whole: bool = False) -> Mapping[str, Any] | None:
    """Match a pattern at the beginning of a name, or the `whole` name.

    Returns:
        The named groups; None if the pattern does not match.

    Raises:
        UnsupportedCheckpointError: matching takes too long, or the package `regex`, which has timeouts, is not
            installed.
    """
    library = _library()
    try:
        match = (library.fullmatch if whole else library.match)(pattern, name, timeout=_SECONDS)
    except TimeoutError:
        raise UnsupportedCheckpointError(
            "a pattern takes too long",
            found=shorten(repr(pattern)),
            expected=f"at most {_SECONDS:g} s for a name",
            where=name,
            hint="write a list of names instead",
        ) from None
    return None if match is None else match.groupdict()


def _library() -> ModuleType:
    try:
        import regex
    except ImportError as error:  # this package was installed without its dependencies, as in framework images
        raise UnsupportedCheckpointError(
            "patterns need the package regex, which is not installed", hint="pip install regex"
        ) from error
    library: ModuleType = regex
    return library
