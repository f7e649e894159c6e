"""Reads JSON strictly, as a repeated key has a value that depends on the parser; plans files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, unreadable_file
from mcore_ckpt_ext.planning.write_plan import OutputFile
from mcore_ckpt_ext.storage.checked_files import read_file


def parse_json(text: str | bytes) -> Any:
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


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        UnreadableCheckpointError: the file is missing, or is not a JSON object.
    """
    try:
        content = parse_json(read_file(path.parent, path.name))
        if not isinstance(content, dict):
            raise ValueError("no object")
    except OSError as error:
        raise unreadable_file("a file of the checkpoint cannot be read", error, path) from error
    except ValueError as error:
        raise UnreadableCheckpointError(
            "a file of the checkpoint is damaged", found=str(error), where=str(path)
        ) from error
    return content


def json_file(name: str, content: object, *, last: bool = False) -> OutputFile:
    """Plan a file with a value as indented JSON."""
    text = json.dumps(content, indent=2).encode() + b"\n"
    return OutputFile(name, len(text), ((0, text),), last)
