"""A validator for the keywords of JSON Schema in this package's schemas; any other keyword is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
_WORDS = {
    "$schema", "title", "description", "type", "properties", "required", "additionalProperties", "anyOf", "enum",
    "const", "items", "prefixItems", "minItems", "maxItems",
}  # fmt: skip


def violations(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """Return the violations of a schema by a value."""
    assert set(schema) <= _WORDS, f"{where}: {set(schema) - _WORDS}"
    if "anyOf" in schema:
        found = [violations(value, one, where) for one in schema["anyOf"]]
        return [] if any(not one for one in found) else min(found, key=len)
    if "const" in schema and value != schema["const"]:
        return [f"{where}: {value!r} is not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    if "type" in schema and not _is_of(value, schema["type"]):
        return [f"{where}: {value!r} is no {schema['type']}"]
    if isinstance(value, dict):
        return list(_of_object(value, schema, where))
    if isinstance(value, list):
        return list(_of_array(value, schema, where))
    return []


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and not (isinstance(value, bool) and kind in ("integer", "number"))


def _of_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    yield from (f"{where}: no {name}" for name in schema.get("required", []) if name not in value)
    for name, one in value.items():
        if name in properties:
            yield from violations(one, properties[name], f"{where}.{name}")
        elif others is False:
            yield f"{where}: {name} is not known"
        elif others is not True:
            yield from violations(one, others, f"{where}.{name}")


def _of_array(value: list[Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{where}: {len(value)} items"
    kinds = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
    for number, (one, kind) in enumerate(zip(value, kinds, strict=False)):
        yield from violations(one, kind, f"{where}[{number}]")
