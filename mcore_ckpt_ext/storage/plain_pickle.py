"""Plain pickles, as the indexes of checkpoints are: recognized by a regular expression, and cheap to load.

A pickle is expensive where it hashes a tuple that refers to a tuple that refers to a tuple, and so on, where many
tuples have one hash, and where it calls something with large arguments (`pickle_cost`). A plain pickle does none of it:

- tuples of five or fewer texts and numbers below 2**31 are small, however often the pickle refers to them. Nobody
  foresees a text's hash, and there are too few such numbers: to find a thousand of one hash takes over 2**40 trials;
- a tuple that becomes an object's state at once may hold anything: that object looks at it first;
- any other tuple is shown to the unpickler's owner, which checks that it is short, holds no other tuple, but for the
  one that a size is made of, and has a hash of its own;
- the arguments of a call are a small tuple, or else the owner makes the call, and only of what merely keeps them.

The opcodes alone do not show the last two. So the pickle is rewritten: they become persistent references, of which a
plain pickle has none of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache

_MOST_ATOMS = 5
_PROTOCOL, _FRAME, _LONG_TEXT, _STOP = b"\x80", b"\x95", b"X", b"."
_FRAME_BYTES = 9
# What asks the owner: of a tuple alone for that tuple, of a pair of a class and a tuple for what that makes.
_ASK, _ASK_TO_CALL = b"\x85Q", b"\x86Q"
# After an attribute's name: a list with several elements; how it ends, and the object with it; what can stand for it.
_OF_MANY, _END_OF_LAST, _TRUE_AT_LAST = b"\x94]\x94(", b"eub.", b"\x94\x88ub."


@cache
def _patterns() -> tuple[re.Pattern[bytes], re.Pattern[bytes], re.Pattern[bytes]]:
    """Many opcodes of a plain pickle in one match, for an index has millions; each of them; a tuple of anything."""
    text = b"\x8c(?:%b)" % b"|".join(b"%b.{%d}" % (re.escape(bytes([length])), length) for length in range(256))
    whole = b"|".join(b"%b.{%d}" % (bytes([length]), length) for length in range(9))
    number = b"(?:K.|M..|J.{4})"
    atom = b"(?:K.|M..|J.{4}|[N\x88\x89])"
    large = b"\x8a(?:%b)" % whole
    mark = rb"\((?![KMJN\x88\x89])"  # that no tuple of atoms follows
    # What a tuple may be of, and what follows it: a tuple of that tuple, a call with it.
    rest = b"\x94?(?:\x85\x94?)?R?"
    third = b"%b(?:[\x85-\x87]%b)?" % (atom, rest)
    second = b"%b(?:[\x85\x86]%b|%b)?" % (atom, rest, third)
    atoms = b"%b(?:\x85%b|%b)?" % (atom, rest, second)
    marked = rb"\((?:%b{0,%d}t%b)?" % (atom, _MOST_ATOMS, rest)
    texts = b"%b\x94?(?:\x85%b)?" % (text, rest)
    # What most of an index is: references, to classes of which an object is made, of which a size is made.
    made = rb"\)\x81\x94(?:}\x94%b)?" % mark
    size = b"\x94\x85\x94R\x94"
    sizes = b"%b(?:\x85%b|%b(?:\x86%b|%b\x87%b))" % (number, size, number, size, number, size)
    follows = b"(?:%b|%b|%b)?" % (made, sizes, atoms)
    name = rb"c[\w.]{1,99}\n[\w.]{1,99}\n"
    others = rb"[}\]\x93\x94ubeas]+|\)\x81?|%b|t\x94?b|%b|%b|G.{8}|\x80." % (mark, large, name)
    unit = b"|".join((rb"j.{4}%b|h.%b" % (follows, follows), others, atoms, marked, texts))
    # Nothing is ever tried in another way, which Python 3.11 can be told; it is faster, too.
    runs = b"(?:%b){1,100}%b" % (unit, b"+" if sys.version_info >= (3, 11) else b"")
    # No repetition within the repetition: it would be tried in every way.
    steps = rb"(?:[()}\]\x81\x93\x94ubeast\x85-\x87R]|h.|j.{4}|%b|%b|%b|%b|G.{8}|\x80.)*" % (atom, large, text, name)
    return re.compile(runs, re.DOTALL), re.compile(steps, re.DOTALL), re.compile(b"([t\x85-\x87])(\x94?)(R?)")


def plain_form(data: bytes) -> bytes | None:
    """A pickle that makes the same and costs little, if what it names are classes that keep their arguments, and sizes.

    Returns:
        `data` itself; or one with persistent references, which are tuples of one tuple, or of a class and a tuple; or
        None where `data` is not plain.
    """
    runs, steps, loose = _patterns()
    stream, cuts = _without_frames(data)
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
        elif stream[position : position + 1] == _STOP:
            return _framed(b"".join([*pieces, stream[kept : position + 1]])) if pieces else data
        else:
            return None
        while cuts and cuts[-1] < end:
            if not steps.fullmatch(stream, position, cuts.pop()):
                return None
        position = end


def without_last(data: bytes, attribute: str, needed: Sequence[str]) -> bytes | None:
    """The pickle of an object without the content of its last attribute, a list, which becomes True.

    A pickle that looks like this and is another makes something else, or nothing: whoever loads it looks at the result.

    Args:
        data: the pickle.
        attribute: the name of the last attribute.
        needed: names of others, which must come before it.

    Returns:
        None where the pickle does not end with a list of that name that has something in it.
    """
    name = _text_of(attribute)
    position = data.find(name)
    if position < 0 or not data.startswith(_OF_MANY, position + len(name)) or not data.endswith(_END_OF_LAST):
        return None
    if any(data.find(_text_of(other), position) >= 0 for other in needed):
        return None
    before, _ = _without_frames(data[:position])
    return _framed(before + name + _TRUE_AT_LAST)


def _text_of(name: str) -> bytes:
    """A short text in a pickle."""
    return b"\x8c" + bytes([len(name)]) + name.encode()


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


def _framed(stream: bytes) -> bytes:
    """The pickle in one frame, so that it is not read byte by byte."""
    begin = 2 if stream[:1] == _PROTOCOL else 0
    return stream[:begin] + _FRAME + (len(stream) - begin).to_bytes(8, "little") + stream[begin:]
