"""A look at a pickle's opcodes before it is loaded: what loading it would cost.

A pickle names an object once and may refer to it often, so that its size says nothing of the work of loading it:

- a tuple of two references to a tuple of two references and so on has 2**40 leaves in 400 bytes, and to use it as the
  key of a dict, the unpickler visits them all, for Python's tuples do not remember their hash;
- six bytes call `bytearray` for another copy of what was pickled once;
- five bytes name a memo index for which the unpickler makes room of 64 GiB, 16 bytes for each number up to it, whether
  or not anything comes before. A pickler numbers what it wrote: no honest index exceeds the pickle's own length.

`weigh` takes the steps of the unpickler on the sizes of objects in place of the objects, and spends what hashing and
calls would cost. It is several times slower than loading. So there is a shorter way for a plain pickle (`is_plain`), as
large indexes are. Opcodes: `pickletools.opcodes` of Python 3.10 to 3.14.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from mcore_ckpt_ext.storage.budget import Budget

_MOST_ATOMS = 16


_PROTOCOL, _FRAME, _LONG_TEXT, _STOP = b"\x80", b"\x95", b"X", b"."
_FRAME_BYTES = 9


@cache
def _plain() -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Of a plain pickle: many opcodes in one match, for an index may have millions; and any that it may have."""
    text = b"\x8c(?:%b)" % b"|".join(b"%b.{%d}" % (re.escape(bytes([length])), length) for length in range(256))
    whole = b"|".join(b"%b.{%d}" % (bytes([length]), length) for length in range(9))
    atom = b"(?:K.|M..|J.{4}|[N\x88\x89]|\x8a(?:%b))" % whole
    # What a tuple may be of, and what follows it: a tuple of that tuple, a call with it.
    rest = b"\x94?(?:\x85\x94?)?R?"
    third = b"%b(?:[\x85-\x87]%b)?" % (atom, rest)
    second = b"%b(?:[\x85\x86]%b|%b)?" % (atom, rest, third)
    atoms = b"%b(?:\x85%b|%b)?" % (atom, rest, second)
    marked = rb"\((?:%b{0,%d}t%b)?" % (atom, _MOST_ATOMS, rest)
    texts = b"%b\x94?(?:\x85%b)?" % (text, rest)
    # What most of an index is, in one repetition: references, marks that no tuple of atoms follows, states.
    most = rb"(?:h.|j.{4}|\)\x81|[)}\]\x93\x94ubeas]|\((?![KMJN\x88-\x8a])|t\x94?b){1,64}"
    unit = b"|".join((most, atoms, marked, texts, rb"G.{8}|\x80."))
    # No repetition within the repetition: it would be tried in every way.
    tokens = rb"(?:[()}\]\x81\x93\x94ubeast\x85-\x87R]|h.|j.{4}|%b|%b|G.{8}|\x80.)*" % (atom, text)
    return re.compile(b"(?:%b){1,500}" % unit, re.DOTALL), re.compile(tokens, re.DOTALL)


def is_plain(data: bytes) -> bool:
    """Whether a pickle has nothing to multiply, if what it calls only makes records and sizes (`_PlainUnpickler`).

    Its tuples hold a few numbers and texts and nothing that the pickle refers to. So do the arguments of its calls.
    Only a tuple that becomes an object's state at once may hold anything: that object looks at it first.
    """
    runs, steps = _plain()
    stream, cuts = _without_frames(data)
    position = 0
    while True:
        if run := runs.match(stream, position):
            end = run.end()
        elif stream[position : position + 1] == _LONG_TEXT:
            end = position + 5 + int.from_bytes(stream[position + 1 : position + 5], "little")
        else:
            return stream[position : position + 1] == _STOP
        while cuts and cuts[-1] < end:
            if not steps.fullmatch(stream, position, cuts.pop()):
                return False
        position = end


def _without_frames(data: bytes) -> tuple[bytes, list[int]]:
    """A pickle without the marks of its frames, which help to read ahead, and where they were, the last first.

    They may be between any two opcodes, and in a damaged pickle elsewhere.
    """
    position = 2 if data[:1] == _PROTOCOL else 0
    pieces, cuts, length = [data[:position]], [], position
    while data[position : position + 1] == _FRAME:
        begin = position + _FRAME_BYTES
        position = begin + int.from_bytes(data[position + 1 : begin], "little")
        cuts.append(length)
        pieces.append(data[begin:position])
        length += len(pieces[-1])
    return b"".join([*pieces, data[position:]]), cuts[::-1]


# What stands on the unpickler's stack: the size of something without parts, the parts of a tuple or of what a call
# made, or the parts of what can grow.
_Cell = Any
# Opcodes by the length of their argument, and of what precedes it to say how long it is.
_FIXED = dict.fromkeys(b"N\x88\x89)", 0) | {ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("G"): 8}
_COUNTED = {
    ord("\x8c"): 1, ord("X"): 4, 0x8D: 8, ord("U"): 1, ord("T"): 4, ord("C"): 1, ord("B"): 4, 0x8E: 8, 0x96: 8,
}  # fmt: skip
_LONGS = {0x8A: 1, 0x8B: 4}
_LINES = {ord("I"), ord("L"), ord("F"), ord("S"), ord("V")}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_HASHED, _CALLED = "the keys of dicts", "the arguments of calls"


class _Scale:
    """The unpickler's stack and memo, of sizes."""

    def __init__(self, data: bytes, budget: Budget) -> None:
        self._data, self._budget = data, budget
        self._stack: list[_Cell] = []
        self._below: list[list[_Cell]] = []
        self._memo: dict[int, _Cell] = {}

    def run(self) -> int:
        """Take all steps; where the pickle ends."""
        data, position = self._data, 0
        while True:
            code = data[position]
            position += 1
            if code in _FIXED:
                self._stack.append(1)
                position += _FIXED[code]
            elif code in _COUNTED:
                first = position + _COUNTED[code]
                length = int.from_bytes(data[position:first], "little")
                self._stack.append(1 + length)
                position = first + length
            elif code in _LONGS:  # whose hash Python does not remember: as something with parts
                first = position + _LONGS[code]
                length = int.from_bytes(data[position:first], "little")
                self._stack.append((1 + length,))
                position = first + length
            elif code in _LINES:
                end = data.index(b"\n", position) + 1
                self._stack.append((end - position,))
                position = end
            elif code == 0x2E:  # STOP
                return position
            else:
                position = self._structure(code, position)

    def _structure(self, code: int, position: int) -> int:
        """One step that uses the stack or the memo; where the next one is."""
        data, stack = self._data, self._stack
        match chr(code):
            case "h":
                stack.append(self._memo[data[position]])
                return position + 1
            case "j":
                stack.append(self._memo[int.from_bytes(data[position : position + 4], "little")])
                return position + 4
            case "\x94":
                self._memo[len(self._memo)] = stack[-1]
            case "q":
                self._memo[data[position]] = stack[-1]
                return position + 1
            case "r":
                self._put(int.from_bytes(data[position : position + 4], "little"))
                return position + 4
            case "(":
                self._below.append(stack)
                self._stack = []
            case "t":
                self._replace(tuple(self._marked()))
            case "\x85" | "\x86" | "\x87":
                stack[-_TUPLES[code] :] = [tuple(self._top(_TUPLES[code]))]
            case "}" | "]" | "\x8f":
                stack.append([])
            case "l" | "d" | "\x91":
                parts = self._marked()
                self._hash(parts if code == 0x91 else parts[::2] if code == ord("d") else [])
                self._replace(list(parts))
            case "a" | "s":
                parts = self._top(1 if code == ord("a") else 2)
                del stack[-len(parts) :]
                self._extend(parts, [] if code == ord("a") else parts[:1])
            case "e" | "u" | "\x90":
                parts = self._marked()
                self._extend(parts, [] if code == ord("e") else parts[::2] if code == ord("u") else parts)
            case "R" | "\x81" | "b":
                self._call(2)
                if code == ord("b"):
                    stack.pop()
                else:
                    stack[-2:] = [(stack[-1],)]
            case "\x92":
                self._call(3)
                stack[-3:] = [tuple(stack[-2:])]
            case "o":
                parts = self._marked()
                self._walk(parts, _CALLED)
                self._replace(tuple(parts))
            case "\x93":
                self._top(2)
                stack[-2:] = [1]
            case "c" | "i":
                position = data.index(b"\n", data.index(b"\n", position) + 1) + 1
                if code == ord("i"):
                    parts = self._marked()
                    self._walk(parts, _CALLED)
                    self._replace(tuple(parts))
                else:
                    stack.append(1)
            case "Q":
                self._walk([stack.pop()], _CALLED)
                stack.append(1)
            case "P":
                position = data.index(b"\n", position) + 1
                stack.append(1)
            case "p" | "g":
                end = data.index(b"\n", position) + 1
                index = int(data[position:end])
                if code == ord("p"):
                    self._put(index)
                else:
                    stack.append(self._memo[index])
                position = end
            case "0":
                if stack:
                    stack.pop()
                else:
                    self._marked()
            case "1":
                self._marked()
            case "2":
                stack.append(stack[-1])
            case "\x80":
                position += 1
            case "\x95":
                position += 8
            case _:
                raise ValueError(f"opcode {code:#x} is unknown, or none that a checkpoint has")
        return position

    def _top(self, count: int) -> list[_Cell]:
        if len(self._stack) < count:
            raise ValueError("the pickle takes more than it has put down")
        return self._stack[-count:]

    def _marked(self) -> list[_Cell]:
        """What has been put down since the last mark, and back to what lay before it."""
        parts, self._stack = self._stack, self._below.pop()
        return parts

    def _replace(self, cell: _Cell) -> None:
        self._stack.append(cell)

    def _extend(self, parts: list[_Cell], hashed: list[_Cell]) -> None:
        self._hash(hashed)
        grown = self._stack[-1]
        if isinstance(grown, list):
            grown.extend(parts)

    def _put(self, index: int) -> None:
        if not 0 <= index <= max(len(self._data), 1 << 16):
            raise ValueError(f"memo index {index} in a pickle of {len(self._data)} bytes")
        self._memo[index] = self._stack[-1]

    def _hash(self, parts: list[_Cell]) -> None:
        for part in parts:
            if type(part) is not int:
                self._walk([part], _HASHED)

    def _call(self, count: int) -> None:
        """Arguments or state are copied, and walked through in depth by `dict`, `set` and `str`."""
        self._walk(self._top(count)[1:], _CALLED)

    def _walk(self, cells: list[_Cell], purpose: str) -> None:
        spend, left = self._budget.spend, cells
        while left:
            cell = left.pop()
            if type(cell) is int:
                spend(cell, purpose)
            else:
                spend(1 + len(cell), purpose)
                left.extend(cell)


def weigh(data: bytes, budget: Budget) -> int:
    """Spend what it costs to load a pickle; where it ends.

    Raises:
        OverBudgetError: it costs more than its size allows.
        ValueError, LookupError: it cannot be loaded.
    """
    return _Scale(data, budget).run()
