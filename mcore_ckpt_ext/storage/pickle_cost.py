"""Estimates the cost of loading a pickle from its opcodes, without loading it.

A pickle creates an object once and may refer to it many times, so its size does not limit the cost of loading it:

- nested tuples of two references each have 2**40 leaves in 400 bytes. If such a tuple is the key of a dict, the
  unpickler visits all leaves, because Python's tuples do not cache their hash;
- numbers and tuples can be chosen to have one hash, and a dict compares each such key with all others;
- six bytes call `bytearray`, which copies an object once more;
- five bytes name a memo index for which the unpickler allocates 64 GiB, 16 bytes for each index up to it. A pickler
  counts the objects that it has written, so no valid index exceeds the length of the pickle.

`weigh` executes the pickle on sizes instead of objects, and spends the cost of hashing and calls from a budget. It is
several times slower than loading, so large indexes use a faster check (`plain_pickle`). Source of the opcodes:
`pickletools.opcodes` of Python 3.10 to 3.14.
"""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.storage.budget import Budget

# An item on the unpickler's stack: the size of an object without parts, the parts of a tuple or of an object that a
# call created, or the list of parts of an object that can grow.
_Cell = Any
# Length of an opcode's argument, or of the number before the argument that gives its length.
_FIXED = dict.fromkeys(b"N\x88\x89)", 0) | {ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("G"): 8}
_COUNTED = {
    ord("\x8c"): 1, ord("X"): 4, 0x8D: 8, ord("U"): 1, ord("T"): 4, ord("C"): 1, ord("B"): 4, 0x8E: 8, 0x96: 8,
}  # fmt: skip
_LONGS = {0x8A: 1, 0x8B: 4}
_LINES = {ord("I"), ord("L"), ord("F"), ord("S"), ord("V")}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_DEEPEST = 1000
# Bytes of an integer; those of intact files have 16. Each reference to a larger one would cost a computation.
_LONGEST, _WORD = 1 << 11, 8
_OBJECT = ((),)  # created by a call without arguments; its hash is not computed from parts
_HASHED, _CALLED = "the keys of dicts", "the arguments of calls"


class _Scale:
    """The unpickler's stack and memo, with sizes instead of objects."""

    def __init__(self, data: bytes, budget: Budget) -> None:
        self._data, self._budget = data, budget
        self._stack: list[_Cell] = []
        self._below: list[list[_Cell]] = []
        self._memo: dict[int, _Cell] = {}
        self._keys = 0

    def run(self) -> int:
        """Execute all opcodes, and return the position after the pickle."""
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
            elif code in _LONGS:
                first = position + _LONGS[code]
                length = int.from_bytes(data[position:first], "little")
                if length > _LONGEST:
                    raise ValueError(f"a whole number of {length:,} bytes")
                # A large integer counts as an object with parts: its hash is not cached, and many can have one hash.
                self._stack.append(1 + length if length <= _WORD else (1 + length,))
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
        """Execute one opcode that uses the stack or the memo, and return the position of the next."""
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
                parts = self._marked()
                self._stack.append(tuple(parts))
            case "\x85" | "\x86" | "\x87":
                stack[-_TUPLES[code] :] = [tuple(self._top(_TUPLES[code]))]
            case "}" | "]" | "\x8f":
                stack.append([])
            case "l" | "d" | "\x91":
                parts = self._marked()
                self._hash(parts if code == 0x91 else parts[::2] if code == ord("d") else [])
                self._stack.append(list(parts))
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
                self._stack.append(tuple(parts))
            case "\x93":
                self._top(2)
                stack[-2:] = [1]
            case "c" | "i":
                position = data.index(b"\n", data.index(b"\n", position) + 1) + 1
                if code == ord("i"):
                    parts = self._marked()
                    self._walk(parts, _CALLED)
                    self._stack.append(tuple(parts))
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
                raise ValueError(f"opcode {code:#x} is unknown, or not used by checkpoints")
        return position

    def _top(self, count: int) -> list[_Cell]:
        if len(self._stack) < count:
            raise ValueError("the pickle removes more items from the stack than it has added")
        return self._stack[-count:]

    def _marked(self) -> list[_Cell]:
        """Remove and return all items since the last mark."""
        parts, self._stack = self._stack, self._below.pop()
        return parts

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
            if type(part) is not int and part != _OBJECT:
                self._walk([part], _HASHED)
                self._keys += 1
                self._budget.spend(self._keys, "keys that may have one hash")

    def _call(self, count: int) -> None:
        """Spend the cost of a call: it copies arguments or state; `dict`, `set` and `str` visit all parts."""
        self._walk(self._top(count)[1:], _CALLED)

    def _walk(self, cells: list[_Cell], purpose: str) -> None:
        """Spend a step for each part.

        Raises:
            OverBudgetError: there are too many parts.
            ValueError: the parts are nested so deeply that Python would crash: it hashes tuples recursively without a
                check.
        """
        spend, begun = self._budget.spend, [iter(cells)]
        while begun:
            for cell in begun[-1]:
                if type(cell) is int:
                    spend(cell, purpose)
                    continue
                spend(1 + len(cell), purpose)
                begun.append(iter(cell))
                if len(begun) > _DEEPEST:
                    raise ValueError(f"{purpose} are nested deeper than {_DEEPEST} levels")
                break
            else:
                begun.pop()


def weigh(data: bytes, budget: Budget) -> int:
    """Spend the cost of loading a pickle, and return the position after it.

    Raises:
        OverBudgetError: loading costs more than the size of the pickle allows.
        ValueError, LookupError: the pickle cannot be loaded.
    """
    return _Scale(data, budget).run()
