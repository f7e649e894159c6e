"""Writes the JSON Schemas (draft 2020-12) of `--json` to the package and to the documentation.

python -m scripts.documentation.json_schemas        after a command's result has changed; raise its schema number, too
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.cli.doctor import Report as DoctorReport
from mcore_ckpt_ext.defaults import SCHEMAS
from mcore_ckpt_ext.errors import DETAILS
from mcore_ckpt_ext.operations.check_results import VerificationResult
from mcore_ckpt_ext.operations.comparison_result import Comparison
from mcore_ckpt_ext.operations.conversion import Report as ConversionReport
from mcore_ckpt_ext.operations.inspection_result import Inspection
from mcore_ckpt_ext.operations.layout_plan import LayoutPlan
from mcore_ckpt_ext.rehearsal.result import Rehearsal
from mcore_ckpt_ext.selftest.report import Report as SelfTestReport

REPOSITORY = Path(__file__).parents[2]
FOLDERS = (REPOSITORY / "mcore_ckpt_ext/cli/schemas", REPOSITORY / "docs/reference/schemas")
RESULTS: dict[str, tuple[type, ...]] = {
    "inspect": (Inspection,), "convert": (ConversionReport,), "verify": (VerificationResult,), "diff": (Comparison,),
    "plan": (LayoutPlan, Rehearsal), "doctor": (DoctorReport,), "selftest": (SelfTestReport,),
}  # fmt: skip
"""The results of each command; its options select one of several."""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# JSON has only finite numbers; others are printed as strings.
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, bool: {"type": "boolean"}, float: _NUMBER,
    type(None): {"type": "null"}, Path: {"type": "string"}, os.PathLike[str]: {"type": "string"}, Any: {}, object: {},
}  # fmt: skip

_OF_DETAILS = {
    "found": "the value that is wrong; null without one",
    "expected": "what is expected in its place; null if nothing can be said",
    "where": "the file, tensor or setting; null if it is the command as a whole",
    "hint": "what to do; null without advice",
}


def schema_of(command: str) -> dict[str, Any]:
    """Return the schema of a command's `--json` output, from the classes of its results."""
    results = [_result(command, kind) for kind in RESULTS[command]]
    details = {name: {**_type(str | None), "description": _OF_DETAILS[name]} for name in DETAILS}
    kind = {"type": "string", "description": "the name of the error's class"}
    error = _closed({"kind": kind, "message": {"type": "string", "description": "what is wrong"}, **details})
    error["description"] = "why the command came to no result"
    failure = _closed({**_envelope(command, [2, 130]), "error": error})
    return {"$schema": _DIALECT, "title": f"mcore-ckpt {command} --json", "anyOf": [*results, failure]}


def _result(command: str, kind: type) -> dict[str, Any]:
    result = _object(kind)
    envelope = _envelope(command, [0, 1])
    result["properties"] = {**envelope, **result["properties"], "schema": envelope["schema"]}
    result["properties"]["error"] = {"type": "null", "description": "null, since the command came to a result"}
    result["required"] = list(result["properties"])
    return result


def _envelope(command: str, codes: list[int]) -> dict[str, Any]:
    return {
        "schema": {"const": SCHEMAS[command], "description": "version of this format"},
        "command": {"const": command, "description": "the command that printed it"},
        "ok": {"type": "boolean", "description": "true exactly where the exit code is 0"},
        "exit_code": {"enum": codes, "description": "the exit code of the command"},
        "error": {},
    }  # fmt: skip


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def _object(kind: type) -> dict[str, Any]:
    """Return the schema of a dataclass, with the descriptions in its docstring."""
    hints, text = typing.get_type_hints(kind), inspect.getdoc(kind) or ""
    found = _closed({field.name: _type(hints[field.name]) for field in dataclasses.fields(kind)})
    for name, of_field in found["properties"].items():
        match = re.search(rf"^ +{name}: (.*(?:\n {{8,}}.*)*)", text, re.MULTILINE) or re.search(
            rf"`{name}`: ([^;.]+)", text
        )
        if match is not None:
            of_field["description"] = " ".join(match[1].split())
    return {"description": " ".join(text.partition("\n\n")[0].split()), **found}


def _type(kind: Any) -> dict[str, Any]:
    """Return the schema of an annotation.

    Raises:
        TypeError: a result has an annotation of an unsupported kind.
    """
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if dataclasses.is_dataclass(kind):
        return _object(typing.cast("type", kind))
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple, which is a list in JSON
        return _sequence(list(typing.get_type_hints(kind).values()))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        schemas = [_type(one) for one in arguments]
        return {"anyOf": [schema for number, schema in enumerate(schemas) if schema not in schemas[:number]]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple and Ellipsis not in arguments:
        return _sequence(arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    if origin in (tuple, list, typing.get_origin(typing.Sequence[int])):
        return {"type": "array", "items": _type(arguments[0])}
    raise TypeError(f"an annotation without a schema: {kind}")


def _sequence(kinds: Sequence[Any]) -> dict[str, Any]:
    items = [_type(one) for one in kinds]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def texts() -> dict[str, str]:
    """Return the text of each schema by file name."""
    return {f"{command}.json": json.dumps(schema_of(command), indent=1) + "\n" for command in RESULTS}


def main() -> None:
    """Write all files."""
    for folder in FOLDERS:
        folder.mkdir(exist_ok=True)
        for name, text in texts().items():
            (folder / name).write_text(text)


if __name__ == "__main__":
    main()
