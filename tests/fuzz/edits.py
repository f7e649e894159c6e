"""Edits files so that they stay a pickle, an archive or JSON, and readers get beyond the first byte."""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any, Protocol

# Sizes and offsets at which arithmetic breaks, and that allocate too much when they are believed.
INTERESTING = (-1, 0, 1, 2, 3, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 62) - 1, 1 << 63, -(1 << 63))
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG"}
_TEXTS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_MOST_EDITS = 6
_HEADER = struct.Struct("<Q")


class Choices(Protocol):
    """Where decisions come from: the fuzzer's bytes, or a generator of random numbers."""

    def between(self, low: int, high: int) -> int:
        """An integer in `[low, high]`."""


class ByChance:
    """Decisions as they come."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def between(self, low: int, high: int) -> int:
        """See `Choices`."""
        return self._random.randint(low, high)


Editor = Callable[[Choices], bytes]


def raw(data: bytes) -> Editor:
    """Other bytes, mostly near the end, where a zip says what lies where; sometimes a shorter file."""

    def edited(choices: Choices) -> bytes:
        changed = bytearray(data)
        for _ in range(choices.between(1, 4)):
            back = choices.between(1, min(600, len(data)) if choices.between(0, 3) else len(data))
            changed[len(data) - back] = choices.between(0, 255)
        return bytes(changed[: choices.between(0, len(data))] if choices.between(0, 3) == 0 else changed)

    return edited


def pickled(data: bytes) -> Editor:
    """A pickle, changed opcode by opcode; frames, which only help a reader to read ahead, are left out."""
    found = list(pickletools.genops(data))
    ends = [position for *_, position in found[1:]] + [len(data)]
    operations = [
        (opcode.name, argument, data[begin:end])
        for (opcode, argument, begin), end in zip(found, ends, strict=True)
        if opcode.name != "FRAME"
    ]
    texts = sorted({argument for name, argument, _ in operations if name in _TEXTS})
    integers = [number for number, (name, *_) in enumerate(operations) if name in _INTEGERS]
    strings = [number for number, (name, *_) in enumerate(operations) if name in _TEXTS]

    def edited(choices: Choices) -> bytes:
        pieces = [original for *_, original in operations]

        def place() -> int:
            return choices.between(1, len(pieces) - 2)

        for _ in range(choices.between(1, _MOST_EDITS)):
            kind = choices.between(0, 6)
            if kind <= 1 and integers:
                pieces[_one_of(choices, integers)] = _integer(_number(choices))
            elif kind <= 3 and strings:
                pieces[_one_of(choices, strings)] = _string(_text(choices, _one_of(choices, texts)))
            elif kind == 4:
                pieces[place()] = b""
            elif kind == 5:
                pieces[place()] *= choices.between(2, 5)
            else:
                first, second = place(), place()
                pieces[first], pieces[second] = pieces[second], pieces[first]
        return b"".join(pieces)

    return edited


def archived(data: bytes) -> Editor:
    """A torch archive whose pickle is changed, checksums and all."""
    members = _members(data)
    name = _pickle_name(members)
    change = pickled(members[name])

    def edited(choices: Choices) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            for member, content in {**members, name: change(choices)}.items():
                archive.writestr(member, content)
        return stream.getvalue()

    return edited


def pickle_of(archive: bytes) -> bytes:
    """The pickle of a torch archive."""
    members = _members(archive)
    return members[_pickle_name(members)]


def text(data: bytes) -> Editor:
    """A JSON text with other values, keys left out, or lists where dicts were."""
    tree = json.loads(data)

    def edited(choices: Choices) -> bytes:
        return json.dumps(_changed(tree, choices)).encode()

    return edited


def headed(data: bytes) -> Editor:
    """A safetensors file with another header, its length right."""
    (length,) = _HEADER.unpack_from(data)
    rest = data[_HEADER.size + length :]
    change = text(data[_HEADER.size : _HEADER.size + length])

    def edited(choices: Choices) -> bytes:
        header = change(choices)
        return _HEADER.pack(len(header)) + header + rest

    return edited


def _members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def _pickle_name(members: dict[str, bytes]) -> str:
    (name,) = (name for name in members if name.endswith("/data.pkl"))
    return name


def _changed(tree: Any, choices: Choices) -> Any:
    """The tree with one node below it replaced."""
    if isinstance(tree, (dict, list)) and tree and choices.between(0, 4):
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = _one_of(choices, keys)
        changed = tree.copy()
        if choices.between(0, 7) == 0:
            del changed[key]
        else:
            changed[key] = _changed(tree[key], choices)
        return changed
    if isinstance(tree, str) and choices.between(0, 2):
        return _text(choices, tree)
    values: tuple[Any, ...] = (None, [], {}, "", [tree], {"a": tree}, True, 0.5, _number(choices), _number(choices))
    return _one_of(choices, values)


def _one_of(choices: Choices, values: Any) -> Any:
    return values[choices.between(0, len(values) - 1)]


def _number(choices: Choices) -> int:
    if choices.between(0, 1):
        return choices.between(-(1 << 33), 1 << 33) >> choices.between(0, 32)
    found: int = _one_of(choices, INTERESTING)
    return found


def _text(choices: Choices, near: str) -> str:
    if choices.between(0, 2):
        return near
    at = choices.between(0, len(near))
    return near[:at] + chr(choices.between(32, 126)) + near[at + choices.between(0, 2) :]


def _integer(value: int) -> bytes:
    content = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def _string(value: str) -> bytes:
    content = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(content)) + content
