"""Recognizes plain pickles, such as indexes, by a regular expression; they are cheap to load.

A pickle is expensive if it hashes deeply nested tuples, if many tuples have one hash, or if it calls something with
large arguments (`checked_unpickler`). A plain pickle does none of this:

- tuples of at most five strings and numbers below 2**31 are small, however often the pickle refers to them. Hashes of
  strings are randomized, and such numbers are too few: finding a thousand tuples with one hash takes over 2**40 trials;
- so are tuples of one number below 2**55, as in the sizes of large buffers. Each such number has its own hash, but that
  -1 and -2 share one, and the hash of a tuple with one element is mixed from its hash by steps that can be undone
  (`tuplehash`, Objects/tupleobject.c, Python 3.8 to 3.14);
- a tuple that is immediately set as an object's state may hold anything, because that object checks it first;
- any other tuple is passed to a callback of the unpickler. It checks that the tuple is short, that it contains no other
  tuple except that of a `torch.Size`, and that its hash is unique;
- the arguments of a call are a small tuple; otherwise the callback makes the call, and only if the class merely stores
  its arguments.

The opcodes alone do not show the last two cases. So the pickle is rewritten: these tuples and calls become persistent
references, which a plain pickle does not contain otherwise.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache

_MOST_ATOMS = 5
# An index has a few tuples to be checked; one piece of 8 bytes costs more than to load them with checks.
_MOST_PIECES = 1 << 10
_BYTES_A_PIECE = 8
_PROTOCOL = b"\x80"
_FRAME = b"\x95"
_LONG_TEXT = b"X"
_STOP = b"."
_FRAME_BYTES = 9
# Persistent references: a tuple to be checked, or a class and a tuple to call it with.
_ASK = b"\x85Q"
_ASK_TO_CALL = b"\x86Q"
# Opcodes after an attribute's name: they begin a list of several elements; end the list and the object; or replace the
# list with True and end the object.
_OF_MANY = b"\x94]\x94("
_END_OF_LAST = b"eub."
_TRUE_AT_LAST = b"\x94\x88ub."


@cache
def _patterns() -> tuple[re.Pattern[bytes], re.Pattern[bytes], re.Pattern[bytes]]:
    """Return three patterns: many opcodes of a plain pickle at once, any opcode sequences, other tuples."""
    text = b"\x8c(?:%b)" % b"|".join(b"%b.{%d}" % (re.escape(bytes([length])), length) for length in range(256))
    whole = b"|".join(b"%b.{%d}" % (bytes([length]), length) for length in range(9))
    number = b"(?:K.|M..|J.{4})"
    atom = b"(?:K.|M..|J.{4}|[N\x88\x89])"
    large = b"\x8a(?:%b)" % whole
    long = b"\x8a(?:\x05.{5}|\x06.{6}|\x07.{7})"
    mark = rb"\((?![KMJN\x88\x89])"  # not followed by a tuple of atoms
    # The elements of a tuple, and what may follow it: a tuple of that tuple, or a call with it.
    rest = b"\x94?(?:\x85\x94?)?R?"
    third = b"%b(?:[\x85-\x87]%b)?" % (atom, rest)
    second = b"%b(?:[\x85\x86]%b|%b)?" % (atom, rest, third)
    atoms = b"%b(?:\x85%b|%b)?" % (atom, rest, second)
    alone = b"%b(?:\x85%b)?" % (long, rest)
    marked = rb"\((?:%b{0,%d}t%b)?" % (atom, _MOST_ATOMS, rest)
    texts = b"%b\x94?(?:\x85%b)?" % (text, rest)
    # Most of an index: references to classes followed by the creation of an object or of a size.
    made = rb"\)\x81\x94(?:}\x94%b)?" % mark
    size = b"\x94\x85\x94R\x94"
    sizes = b"%b(?:\x85%b|%b(?:\x86%b|%b\x87%b))" % (number, size, number, size, number, size)
    long_size = b"%b\x85%b" % (long, size)
    follows = b"(?:%b|%b|%b|%b)?" % (made, sizes, long_size, atoms)
    name = rb"c[\w.]{1,99}\n[\w.]{1,99}\n"
    others = rb"[}\]\x93\x94ubeas]+|\)\x81?|%b|t\x94?b|%b|%b|G.{8}|\x80." % (mark, large, name)
    unit = b"|".join((rb"j.{4}%b|h.%b" % (follows, follows), alone, others, atoms, marked, texts))
    # No backtracking is needed: Python 3.11 has possessive quantifiers, which are faster, too.
    runs = b"(?:%b){1,100}%b" % (unit, b"+" if sys.version_info >= (3, 11) else b"")
    # No nested repetition: it would backtrack exponentially.
    steps = rb"(?:[()}\]\x81\x93\x94ubeast\x85-\x87R]|h.|j.{4}|%b|%b|%b|%b|G.{8}|\x80.)*" % (atom, large, text, name)
    return re.compile(runs, re.DOTALL), re.compile(steps, re.DOTALL), re.compile(b"([t\x85-\x87])(\x94?)(R?)")


def plain_form(data: bytes) -> bytes | None:
    """Return a pickle that builds the same object and is cheap to load.

    It is cheap if it names only `torch.Size` and classes that merely store their arguments.

    Returns:
        `data` itself, or a pickle with persistent references, each a tuple of one tuple, or of a class and a tuple.
        None if `data` is not plain.
    """
    runs, steps, loose = _patterns()
    stream, cuts = _strip_frames(data)
    pieces: list[bytes] = []
    kept = position = 0
    while True:
        if match := runs.match(stream, position):
            end = match.end()
        elif stream[position : position + 1] == _LONG_TEXT:
            end = position + 5 + int.from_bytes(stream[position + 1 : position + 5], "little")
        elif match := loose.match(stream, position):
            end = match.end()
            call = _ASK_TO_CALL if match[3] else b""
            pieces += (stream[kept : position + 1], _ASK, match[2], call)
            kept = end
            if len(pieces) > _MOST_PIECES + len(stream) // _BYTES_A_PIECE:
                return None  # rewriting it costs more than the other way
        elif stream[position : position + 1] == _STOP:
            return _join_frames(b"".join([*pieces, stream[kept : position + 1]])) if pieces else data
        else:
            return None
        while cuts and cuts[-1] < end:
            if not steps.fullmatch(stream, position, cuts.pop()):
                return None
        position = end


def strip_last(data: bytes, attribute: str, needed: Sequence[str]) -> bytes | None:
    """Return the pickle of an object with its last attribute, a list, replaced by True.

    Only bytes are compared, so the caller must check the loaded object: the list may not have been its last attribute.

    Args:
        data: the pickle.
        attribute: name of the last attribute.
        needed: names of attributes that must come before it.

    Returns:
        None if the pickle does not end with a non-empty list of that name.
    """
    name = _text_of(attribute)
    position = data.find(name)
    if position < 0 or not data.startswith(_OF_MANY, position + len(name)) or not data.endswith(_END_OF_LAST):
        return None
    if any(data.find(_text_of(other), position) >= 0 for other in needed):
        return None
    before, _ = _strip_frames(data[:position])
    return _join_frames(before + name + _TRUE_AT_LAST)


def _text_of(name: str) -> bytes:
    """Return the opcodes of a short string."""
    return b"\x8c" + bytes([len(name)]) + name.encode()


def _strip_frames(data: bytes) -> tuple[bytes, list[int]]:
    """Return a pickle without frame opcodes, and the positions where they were, the last one first.

    Frames may begin between any two opcodes; in a damaged pickle also elsewhere.
    """
    position = 2 if data[:1] == _PROTOCOL else 0
    pieces = [data[:position]]
    cuts = []
    length = position
    while data[position : position + 1] == _FRAME:
        begin = position + _FRAME_BYTES
        position = begin + int.from_bytes(data[position + 1 : begin], "little")
        cuts.append(length)
        pieces.append(data[begin:position])
        length += len(pieces[-1])
    return b"".join([*pieces, data[position:]]), cuts[::-1]


def _join_frames(stream: bytes) -> bytes:
    """Return the pickle in a single frame, which makes reading it fast."""
    begin = 2 if stream[:1] == _PROTOCOL else 0
    return stream[:begin] + _FRAME + (len(stream) - begin).to_bytes(8, "little") + stream[begin:]
