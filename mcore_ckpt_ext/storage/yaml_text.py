"""Parses YAML as plain data of bounded size; no object is constructed from a tag.

A tag names a class, and an alias repeats a value. Tags other than those of plain values are refused. A repeated value
is counted each time. The text is parsed event by event (PyYAML's `parse`), so that it is refused as soon as it exceeds
a limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.storage.budget import Budget

MOST_BYTES = 8 << 20
"""Upper limit for the size of a text; descriptions of jobs have tens of KiB."""
_MOST_DEPTH = 64
_MOST_NUMBER = 64
_PLAIN = "tag:yaml.org,2002:"

_Sized: TypeAlias = tuple[Any, int]


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML into dicts with strings as keys, lists, and plain values.

    Args:
        text: the text.
        where: path of the file, for messages.

    Raises:
        ValueError: the text is not YAML, is nested too deeply, names a class, or has a key twice.
        OverBudgetError: its aliases repeat far too many values.
        UnsupportedCheckpointError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:  # this package was installed without its dependencies, as in framework images
        raise UnsupportedCheckpointError(
            "a file in YAML cannot be read without PyYAML", where=where, hint="pip install pyyaml"
        ) from error
    if len(text) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES:,} characters")
    try:
        # libyaml's parser is ten times as fast, but not always available.
        events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return _Reader(events, Budget(len(text), where)).document()
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        # Since libyaml 0.2.6 (PyYAML 6.0.4) its own limit may be reached first, because it reads far ahead.
        is_deep = "nesting depth" in str(getattr(error, "problem", None))
        raise ValueError(f"it is nested too deeply: {message}" if is_deep else message) from error


def dump_yaml(content: Any) -> str:
    """Return plain values as YAML.

    Raises:
        UnsupportedCheckpointError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise UnsupportedCheckpointError("YAML cannot be written without PyYAML", hint="pip install pyyaml") from error
    text: str = yaml.safe_dump(content)
    return text


class _Reader:
    """Builds values from YAML events, and counts the values that each one contains, repetitions included."""

    def __init__(self, events: Iterator[Any], budget: Budget) -> None:
        from yaml.constructor import SafeConstructor
        from yaml.resolver import Resolver

        self._events = events
        self._budget = budget
        self._resolver = Resolver()
        self._constructor = SafeConstructor()
        self._anchors: dict[str, _Sized] = {}

    def document(self) -> Any:
        """Return the only document of the text; None if the text is empty."""
        document: Any = None
        documents = 0
        for event in self._events:
            kind = type(event).__name__
            if kind == "DocumentStartEvent":
                documents += 1
                if documents > 1:
                    raise ValueError("several documents in one file")
                document, _ = self._value(next(self._events), 0)
        return document

    def _value(self, event: Any, depth: int) -> _Sized:
        if depth > _MOST_DEPTH:
            raise ValueError("it is nested too deeply")
        kind = type(event).__name__
        if kind == "AliasEvent":
            if event.anchor not in self._anchors:
                raise ValueError(f"it repeats {event.anchor[:80]!r}, which is not defined")
            value, size = self._anchors[event.anchor]
        elif kind == "ScalarEvent":
            value = self._scalar(event)
            size = 1
        elif kind == "SequenceStartEvent":
            value, size = self._sequence(event, depth)
        elif kind == "MappingStartEvent":
            value, size = self._mapping(event, depth)
        else:
            raise ValueError(f"a {kind} where a value was expected")
        self._budget.spend(size if kind == "AliasEvent" else 1, "the values that anchors repeat")
        if kind != "AliasEvent" and event.anchor is not None:
            self._anchors[event.anchor] = (value, size)
        return value, size

    def _sequence(self, event: Any, depth: int) -> _Sized:
        _check_tag(event, "seq")
        elements = []
        total = 1
        while type(following := next(self._events)).__name__ != "SequenceEndEvent":
            value, size = self._value(following, depth + 1)
            elements.append(value)
            total += size
        return elements, total

    def _mapping(self, event: Any, depth: int) -> _Sized:
        # A set is written as a mapping from its members to null (`params_to_save` of Megatron-Bridge's adapters,
        # 0.3.1).
        _check_tag(event, "map", "set")
        entries: dict[str, Any] = {}
        total = 1
        while type(following := next(self._events)).__name__ != "MappingEndEvent":
            key, _ = self._value(following, depth + 1)
            if isinstance(key, (dict, list)):
                raise ValueError("a key that is not a plain value")
            name = key if isinstance(key, str) else str(key)
            value, size = self._value(next(self._events), depth + 1)
            if name in entries or name == "<<":
                raise ValueError(f"an object has two entries {name[:80]!r}, or merges others")
            entries[name] = value
            total += size + 1
        return entries, total

    def _scalar(self, event: Any) -> Any:
        from yaml.nodes import ScalarNode

        tag = event.tag
        if tag is None or tag == "!":
            tag = self._resolver.resolve(ScalarNode, event.value, event.implicit)
        if tag == f"{_PLAIN}null":
            return None
        if tag not in (f"{_PLAIN}bool", f"{_PLAIN}int", f"{_PLAIN}float"):
            if not tag.startswith(_PLAIN) or tag.startswith(f"{_PLAIN}python"):
                raise ValueError(f"it names a class, {tag[:80]!r}")
            return event.value  # dates and binary data remain strings
        if len(event.value) > _MOST_NUMBER:
            raise ValueError("a number of too many digits")
        node = ScalarNode(tag, event.value)
        make = {"bool": "construct_yaml_bool", "int": "construct_yaml_int", "float": "construct_yaml_float"}
        try:
            return getattr(self._constructor, make[tag.removeprefix(_PLAIN)])(node)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{event.value!r} is no {tag.removeprefix(_PLAIN)}") from error


def _check_tag(event: Any, *plain: str) -> None:
    if event.tag not in (None, "!", *(f"{_PLAIN}{kind}" for kind in plain)):
        raise ValueError(f"it names a class, {event.tag[:80]!r}")
