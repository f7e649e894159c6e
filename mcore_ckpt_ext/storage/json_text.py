"""JSON that says one thing: where an object has a key twice, readers differ in which of the two they take."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """The content of a text in JSON.

    Raises:
        ValueError: it is none, is nested too deeply, or an object in it gives one key two values.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise ValueError(f"an object has two entries {name[:80]!r}")
    return found
