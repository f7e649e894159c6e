"""Prints the `--json` result of every command: a single object with a published schema.

`schema`, `command`, `ok`, `exit_code` and `error` come first, then the keys of the result. After an error, the keys of
the result are missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt_ext.cli.output import json_text, print_json
from mcore_ckpt_ext.defaults import SCHEMAS
from mcore_ckpt_ext.errors import DETAILS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FLAG = "--json"
_RESULT = "the result"
ENVELOPE = ("schema", "command", "ok", "exit_code", "error")


def print_result(command: str, result: DataclassInstance, exit_code: int) -> None:
    """Print the result of a command."""
    print_json(_object(command, result, exit_code))


def check_result_file(path: Path, command: str) -> None:
    """Check that the result of a command may be written to a file, before the command does anything.

    Raises:
        UsageError: the path is another kind of file, or its folder does not exist.
    """
    from mcore_ckpt_ext.storage.atomic_files import check_report

    check_report(
        path,
        lambda existing: _is_result(existing, command),
        what=_RESULT,
        conflict=f"{FLAG} would overwrite something that is not a result of this command",
        earlier="an earlier one of this option",
    )


def _is_result(path: Path, command: str) -> bool:
    import json

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # another process that shares the command has just removed it
        return True
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("command") == command


def write_result(path: Path, command: str, result: DataclassInstance, exit_code: int) -> None:
    """Write the result of a command to a file, as `print_result` prints it.

    Raises:
        DestinationError: the file cannot be written.
    """
    from mcore_ckpt_ext.storage.atomic_files import write_report

    write_report(path, json_text(_object(command, result, exit_code)) + "\n", what=_RESULT)


def _object(command: str, result: DataclassInstance, exit_code: int) -> dict[str, Any]:
    fields = asdict(result)
    return {**_envelope(fields.pop("schema", SCHEMAS[command]), command, exit_code, None), **fields}


def print_error(command: str, exit_code: int, kind: str, message: str, details: Mapping[str, str]) -> None:
    """Print the error that ended a command; `kind` is the name of its public class."""
    error = {"kind": kind, "message": message, **{name: details.get(name) for name in DETAILS}}
    print_json(_envelope(SCHEMAS.get(command, 1), command, exit_code, error))


def wants_json(words: Sequence[str]) -> bool:
    """Return whether a command line has `--json`, even if it is invalid otherwise."""
    return any(word.partition("=")[0] == FLAG for word in words)


def _envelope(schema: int, command: str, exit_code: int, error: dict[str, str | None] | None) -> dict[str, Any]:
    return dict(zip(ENVELOPE, (schema, command, exit_code == 0, exit_code, error), strict=True))
