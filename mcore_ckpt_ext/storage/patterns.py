"""Matches untrusted regular expressions, which may never end, under a time limit."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, shorten

_SECONDS = 2.0  # of the processor


def is_pattern(value: object) -> bool:
    """Whether this is a pattern; errors as of `matched`."""
    library = _library()
    try:
        return isinstance(value, str) and bool(library.compile(value))
    except library.error:
        return False


def matched(pattern: str, name: str, *, whole: bool = False) -> Mapping[str, Any] | None:
    """What a pattern finds at the beginning of a name, or in the `whole` of it; by the names of its groups.

    Raises:
        UnsupportedCheckpointError: it takes too long, or `regex`, which can stop, is not installed.
    """
    library = _library()
    try:
        found = (library.fullmatch if whole else library.match)(pattern, name, timeout=_SECONDS)
    except TimeoutError:
        raise UnsupportedCheckpointError(
            "a pattern takes too long", found=shorten(repr(pattern)), expected=f"at most {_SECONDS:g} s for a name",
            where=name, hint="write a list of names instead",
        ) from None  # fmt: skip
    return None if found is None else found.groupdict()


def _library() -> ModuleType:
    try:
        import regex
    except ImportError as error:  # installed without its dependencies, as images of frameworks are
        raise UnsupportedCheckpointError(
            "patterns need the package regex, which is not installed", hint="pip install regex"
        ) from error
    library: ModuleType = regex
    return library
