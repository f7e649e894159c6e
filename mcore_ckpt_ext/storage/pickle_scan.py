"""A look at a pickle's opcodes before it is loaded.

Python's unpickler makes room for the memo index that a pickle names, 16 bytes for each number up to it, whether or not
anything comes before: five bytes of pickle can ask for 64 GiB. A pickler numbers what it wrote, so that no honest index
exceeds the pickle's own length. Opcodes: `pickletools.opcodes` of Python 3.10 to 3.14.
"""

from __future__ import annotations

import pickletools
import re

_PUT, _LONG_BINPUT, _STOP = b"p", b"r", b"."
_ARGUMENT_LENGTHS = {
    "uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8, "float8": 8, None: 0,
}  # fmt: skip
# Opcodes whose argument is preceded by its length, in so many bytes.
_COUNTED = {
    "string1": 1, "bytes1": 1, "unicodestring1": 1, "long1": 1, "string4": 4, "bytes4": 4, "unicodestring4": 4,
    "long4": 4, "bytes8": 8, "unicodestring8": 8, "bytearray8": 8,
}  # fmt: skip
_LINES = {"stringnl_noescape_pair": 2}


def _runs() -> re.Pattern[bytes]:
    """Many opcodes of fixed length, and short strings, in one match: a large index has millions."""
    by_length: dict[int, bytes] = {}
    for opcode in pickletools.opcodes:
        length = _ARGUMENT_LENGTHS.get(opcode.arg.name if opcode.arg else None)
        code = opcode.code.encode("latin-1")
        if length is not None and code not in (_LONG_BINPUT, _STOP):
            by_length[length] = by_length.get(length, b"") + re.escape(code)
    fixed = [b"[%b]+" % by_length.pop(0)]
    fixed += [b"[%b].{%d}" % (codes, length) for length, codes in sorted(by_length.items())]
    short = b"|".join(b"%b.{%d}" % (re.escape(bytes([length])), length) for length in range(256))
    # A memo index below 65,536 needs no look.
    return re.compile(b"(?:%b|r..\x00\x00|\x8c(?:%b)){1,2000}" % (b"|".join(fixed), short), re.DOTALL)


_RUNS = _runs()
_BY_CODE = {opcode.code.encode("latin-1"): opcode.arg.name for opcode in pickletools.opcodes if opcode.arg}


def check_memo(data: bytes) -> int:
    """Refuse a pickle that names a memo index beyond its own length; returns where it ends.

    Raises:
        ValueError: it does, or an opcode is unknown or cut off.
    """
    position = 0
    while True:
        if run := _RUNS.match(data, position):
            position = run.end()
            continue
        code = data[position : position + 1]
        if code == _STOP:
            return position + 1
        if not code:
            raise ValueError("the pickle has no end")
        position = _past(data, code, position + 1)


def _past(data: bytes, code: bytes, begin: int) -> int:
    """Where the argument that begins there ends."""
    argument = _BY_CODE.get(code)
    if code == _LONG_BINPUT:
        _check_index(int.from_bytes(data[begin : begin + 4], "little"), data)
        return begin + 4
    if argument in _COUNTED:
        first = begin + _COUNTED[argument]
        return first + int.from_bytes(data[begin:first], "little")
    if argument is None or argument in _ARGUMENT_LENGTHS:
        raise ValueError(f"opcode {code!r} is unknown, or cut off")
    end = begin
    for _ in range(_LINES.get(argument, 1)):
        end = data.index(b"\n", end) + 1
    if code == _PUT:
        _check_index(int(data[begin:end]), data)
    return end


def _check_index(index: int, data: bytes) -> None:
    if not 0 <= index <= max(len(data), 1 << 16):
        raise ValueError(f"memo index {index} in a pickle of {len(data)} bytes")
