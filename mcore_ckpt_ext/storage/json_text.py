"""Parses JSON strictly: rejects an object with a repeated key, whose value depends on the parser."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or has an object with two values for one key.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        for name, value in pairs:
            if mapping[name] is not value and mapping[name] != value:  # NaN does not equal itself
                raise ValueError(f"an object has two entries {name[:80]!r}")
    return mapping
