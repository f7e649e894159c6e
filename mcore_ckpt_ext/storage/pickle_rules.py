"""The calls that a pickle may make, and the keys it may hash: those that checkpoints need."""

from __future__ import annotations

import collections
import io
import types
from itertools import product
from typing import Any

from mcore_ckpt_ext.errors import UnsafePickleError, format_value
from mcore_ckpt_ext.storage.pickle_stubs import MetadataStub, Placeholder, Stateless

_NOTHING: tuple[type, ...] = ()
_LISTS = {_NOTHING, (list,), (tuple,)}
# The classes of Python that a pickle may call, and the types of the arguments that Python 3 pickles for them.
CALLS: dict[type, set[tuple[type, ...]]] = {
    **{kind: {_NOTHING} for kind in (object, int, float, bool, str, bytes, list, dict)},
    collections.OrderedDict: {_NOTHING},
    types.SimpleNamespace: {_NOTHING},
    io.BytesIO: {_NOTHING},
    set: _LISTS,
    frozenset: _LISTS,
    tuple: _LISTS,
    complex: {_NOTHING, (float, float)},
    bytearray: {_NOTHING, (bytes,), (bytearray,), (str, str)},
    slice: set(product((int, type(None)), repeat=3)),
    collections.defaultdict: {_NOTHING, (type(None),), (type,)},
    collections.deque: {_NOTHING, (list, int), (tuple, int)},
}
# Keys whose hash is cheap, and that at most a few of their type share.
PLAIN_KEYS = {str, bytes, bool, float, type(None)}
_WORD = 64  # bits of an integer of which at most nine have one hash
_MOST_PARTS = 64  # of a key that is a tuple
_LARGE = 256  # bits of an integer in such a key
_PARTS_OF_COMPLEX = 4  # comparing complex numbers is slow
ENDLESS = 1 << 62  # more steps than any budget has


def check_call(kind: type, arguments: tuple[Any, ...]) -> None:
    """Check the arguments with which a pickle calls a class of `CALLS`.

    Raises:
        UnsafePickleError: no pickler writes such a call.
    """
    given: tuple[type, ...] = tuple(map(type, arguments))
    if kind is collections.defaultdict and given and isinstance(arguments[0], type) and arguments[0] in CALLS:
        given = (type, *given[1:])
    in_latin = given != (str, str) or arguments[1] in ("latin1", "latin-1")
    if given not in CALLS[kind] or not in_latin:
        raise UnsafePickleError(
            "a pickle calls a class in a way that no checkpoint needs; nothing was executed",
            found=f"{kind.__name__} of {format_value(arguments)}",
            hint="do not use this file: it may be an attack",
        )


def parts_of_key(key: Any) -> int:
    """Return how many objects are visited to hash a key, or to compare it with another of its hash.

    Returns:
        0 if few keys can have this hash, `ENDLESS` if no key of a checkpoint has as many parts, or levels of them.

    Raises:
        TypeError: no key of a checkpoint has this type.
    """
    if type(key) in (tuple, frozenset):
        return _parts(key)
    _check_part(key)
    if type(key) is complex:
        return _PARTS_OF_COMPLEX
    return int(type(key) is int and key.bit_length() > _WORD)


def _parts(key: tuple[Any, ...] | frozenset[Any]) -> int:
    count = 0
    waiting = [key]
    while waiting:
        node = waiting.pop()
        count += 1 + len(node)
        if count > _MOST_PARTS:
            return ENDLESS
        for part in node:
            if type(part) in (tuple, frozenset):
                waiting.append(part)
            elif type(part) is int and part.bit_length() > _LARGE:
                return ENDLESS
            else:
                _check_part(part)
    return count


def _check_part(key: Any) -> None:
    is_allowed = type(key) in PLAIN_KEYS or type(key) in (int, complex, object)
    if not is_allowed and not isinstance(key, (type, Placeholder, MetadataStub, Stateless)):
        raise TypeError(f"a key that is a {type(key).__name__}")
