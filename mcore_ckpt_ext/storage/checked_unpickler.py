"""Unpickles with a check before each operation whose cost the size of the pickle does not limit.

A pickle creates an object once and may refer to it many times, so a small pickle can request endless work:

- nested tuples of two references each have 2**40 leaves in 400 bytes. If such a tuple is the key of a dict, all leaves
  are visited, because Python's tuples do not cache their hash; a deep one crashes Python;
- numbers and tuples can be chosen to have one hash, and a dict compares each such key with all others;
- six bytes call `bytearray`, which copies an object once more, or `str`, which decodes by a codec of quadratic cost;
- a slice as an index makes a list twice as long with each opcode.

So the unpickler is the standard library's own in Python, which has the real objects at hand where something is called,
hashed or copied. A pickle calls what `pickle_rules` lists, with arguments of the types that picklers write, or a
stub, which only stores its arguments. Everything else is refused.

A process of its own with a limit of time would not be simpler: Python takes 60 ms to start, while 40 KB load in 4 ms;
the loaded objects would have to be pickled once more; and the result would depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import types
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from mcore_ckpt_ext.errors import UnsafePickleError, format_value
from mcore_ckpt_ext.storage.budget import Budget
from mcore_ckpt_ext.storage.pickle_rules import CALLS, PLAIN_KEYS, check_call, parts_of_key
from mcore_ckpt_ext.storage.pickle_stubs import Function, MetadataStub, PickleStub, Placeholder, Stateless

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_WITH_ATTRIBUTES = (argparse.Namespace, types.SimpleNamespace, collections.OrderedDict)
_SIZED = {str, bytes, bytearray, list, tuple, set, frozenset, collections.deque, *_DICTS}
_LONGEST = 1 << 11  # bytes of an integer; those of intact files have 16
_MOST_DIGITS = 4300  # the limit of Python 3.11 for an integer in text, whose cost is quadratic
_MOST_REFERENCE = 8  # items of a reference to a storage
_STEPS_TO_NAME = 1 << 13  # creating a class costs more than visiting an element
_STEPS_TO_COPY = 4
_CALLED = "the arguments of calls"
_HASHED = "the keys of dicts"


class NameCost:
    """Spends the cost of the classes that the names in a pickle create."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._named: set[tuple[str, str]] = set()

    def spend(self, module: str, name: str) -> None:
        """Spend the cost of a name, once."""
        if (module, name) not in self._named:
            self._named.add((module, name))
            self._budget.spend(_STEPS_TO_NAME, "the names of classes")


class CheckedUnpickler(pickle._Unpickler):
    """Builds the objects of a pickle, and refuses those that cost more than its size justifies.

    Attributes:
        position: where the pickle ended, after `load`.
    """

    # Attributes of the standard library's class that its type stubs omit.
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, where: str) -> None:
        self._stream = io.BytesIO(data)
        super().__init__(self._stream, encoding="utf-8")
        self.budget = Budget(len(data), where)
        self.position = 0
        self._length = len(data)
        self._keys: dict[Any, None] = {}
        self._keys_by_hash: collections.Counter[int] = collections.Counter()

    def load(self) -> Any:
        """Return the object of the pickle.

        Raises:
            OverBudgetError: loading costs more than the size of the pickle allows.
            UnsafePickleError: the pickle calls what no checkpoint calls.
            Exception: the pickle is damaged.
        """
        self.read = self._stream.read
        self.readline = self._stream.readline
        self.stack = []
        self.metastack: list[list[Any]] = []
        self.append = self.stack.append
        self.proto = 0
        dispatch = self.dispatch
        read = self._stream.read
        try:
            while True:
                dispatch[read(1)[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            self.position = self._stream.tell()
            return stop.value

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Call a class of Python or a stub with arguments that a pickler writes for it."""
        self._spend_for(arguments)
        if isinstance(function, type) and function in CALLS:
            return self._instance(function, arguments)
        if isinstance(function, (PickleStub, Function)):
            return function(*arguments)
        raise UnsafePickleError("a pickle calls what no checkpoint calls", found=format_value(function))

    def _new(self, kind: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Create an object without initializing it, as `copyreg.__newobj_ex__` does."""
        self._spend_for((*arguments, keywords))
        if isinstance(kind, type) and kind in CALLS and not keywords:
            return self._instance(kind, arguments)
        if isinstance(kind, PickleStub) and not issubclass(kind, Stateless):
            return kind.__new__(kind, *arguments, **keywords)
        raise UnsafePickleError("a pickle creates what no checkpoint contains", found=format_value(kind))

    def _instance(self, kind: type, arguments: tuple[Any, ...]) -> Any:
        check_call(kind, arguments)
        if kind in (set, frozenset) and arguments:
            self._check_keys(arguments[0])
        return kind(*arguments)

    def _spend_for(self, values: Collection[Any]) -> None:
        """Spend the cost of copying values, each to its first level."""
        self.budget.spend(1 + _STEPS_TO_COPY * len(values), _CALLED)
        sizes = [len(value) for value in values if type(value) in _SIZED]
        self.budget.spend(_STEPS_TO_COPY * sum(sizes), _CALLED)

    def _check_keys(self, keys: Collection[Any]) -> None:
        """Check keys before they are hashed.

        Raises:
            OverBudgetError: many keys have one hash.
            TypeError, ValueError: a key has a type or a size that no key of a checkpoint has.
        """
        if PLAIN_KEYS.issuperset(map(type, keys)):
            return
        for key in keys:
            parts = parts_of_key(key)
            if parts:
                self.budget.spend(parts, _HASHED)
                code = hash(key)
                # It is compared with each of these, here and in the dict.
                self.budget.spend(2 * (parts + 1) * self._keys_by_hash[code], _HASHED)
                if key not in self._keys:
                    self._keys[key] = None
                    self._keys_by_hash[code] += 1

    def _set_items(self, target: Any, keys: list[Any], values: list[Any]) -> None:
        self._check_keys(keys)
        if type(target) in _DICTS:
            target.update(zip(keys, values, strict=True))
        elif isinstance(target, Placeholder):
            for key, value in zip(keys, values, strict=True):
                Placeholder.__setitem__(target, key, value)
        else:
            raise TypeError(f"items of a {type(target).__name__}")

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) in (list, collections.deque):
            target.extend(items)
        elif isinstance(target, Placeholder):
            Placeholder.extend(target, items)
        else:
            raise TypeError(f"elements of a {type(target).__name__}")

    def _set_state(self, target: Any, state: Any) -> None:
        self._spend_for([state])
        if isinstance(target, (Placeholder, MetadataStub, Stateless)):
            set_state: Any = type(target).__setstate__  # not of the object: a pickle could have set it
            set_state(target, state)
        elif type(target) is io.BytesIO:
            if [type(part) for part in state] != [bytes, int, type(None)]:
                raise TypeError("the state of a stream")
            self._spend_for(state)
            target.__setstate__(state)  # type: ignore[attr-defined]
        elif type(target) in _WITH_ATTRIBUTES and type(state) is dict and {str}.issuperset(map(type, state)):
            vars(target).update(state)
        elif state is not None:
            raise TypeError(f"the state of a {type(target).__name__}")

    # One method for each opcode that is replaced.

    def _frame(self) -> None:
        # What a frame contains is read as if there were no frame.
        if self._number(8) > self._length - self._stream.tell():
            raise ValueError("a frame beyond the end")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], _tuple(arguments))

    def _newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._new(self.stack[-1], _tuple(arguments), {})

    def _newobj_ex(self) -> None:
        keywords = self.stack.pop()
        arguments = self.stack.pop()
        self._check_keys(list(keywords))
        self.stack[-1] = self._new(self.stack[-1], _tuple(arguments), keywords)

    def _inst(self) -> None:
        module, name = (self.readline()[:-1].decode("ascii") for _ in range(2))
        self.append(self._call(self.find_class(module, name), tuple(self.pop_mark())))

    def _obj(self) -> None:
        function, *arguments = self.pop_mark()
        self.append(self._call(function, tuple(arguments)))

    def _build(self) -> None:
        state = self.stack.pop()
        self._set_state(self.stack[-1], state)

    def _append(self) -> None:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])

    def _appends(self) -> None:
        items = self.pop_mark()
        self._extend(self.stack[-1], items)

    def _setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set_items(self.stack[-1], [key], [value])

    def _setitems(self) -> None:
        items = self.pop_mark()
        self._set_items(self.stack[-1], items[::2], items[1::2])

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(self.stack[-1], items[::2], items[1::2])

    def _additems(self) -> None:
        items = self.pop_mark()
        self._check_keys(items)
        if type(self.stack[-1]) is not set:
            raise TypeError(f"elements of a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(items)

    def _frozenset(self) -> None:
        items = self.pop_mark()
        self._check_keys(items)
        self.append(frozenset(items))

    def _persid(self) -> None:
        raise TypeError("a reference in text")

    def _binpersid(self) -> None:
        reference = self.stack.pop()
        if type(reference) is not tuple or len(reference) > _MOST_REFERENCE:
            raise UnsafePickleError("a pickle refers to a storage in an unknown way", found=format_value(reference))
        self.append(self.persistent_load(reference))

    def _int(self) -> None:
        text = self._digits()
        self.append(text == b"01" if text in (b"00", b"01") else int(text))

    def _long(self) -> None:
        self.append(int(self._digits().removesuffix(b"L")))

    def _long1(self) -> None:
        self.append(pickle.decode_long(self.read(self._number(1))))

    def _long4(self) -> None:
        length = self._number(4)
        if length > _LONGEST:
            raise ValueError(f"a whole number of {length:,} bytes")
        self.append(pickle.decode_long(self.read(length)))

    def _bytearray8(self) -> None:
        self.append(bytearray(self.read(self._number(8))))

    def _put(self) -> None:
        self._remember(int(self._digits()))

    def _long_binput(self) -> None:
        self._remember(self._number(4))

    def _ext(self) -> None:
        raise TypeError("an extension")

    def _number(self, length: int) -> int:
        return int.from_bytes(self.read(length), "little")

    def _digits(self) -> bytes:
        text = bytes(self.readline()[:-1])
        if len(text) > _MOST_DIGITS:
            raise ValueError(f"a whole number of {len(text):,} digits")
        return text

    def _remember(self, index: int) -> None:
        # A pickler counts the objects that it has written. Other unpicklers allocate memory up to the index.
        if not 0 <= index <= max(self._length, 1 << 16):
            raise ValueError(f"memo index {index} in a pickle of {self._length} bytes")
        self.memo[index] = self.stack[-1]

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        **{
            opcode[0]: method
            for opcode, method in (
                (pickle.FRAME, _frame),
                (pickle.REDUCE, _reduce),
                (pickle.NEWOBJ, _newobj),
                (pickle.NEWOBJ_EX, _newobj_ex),
                (pickle.INST, _inst),
                (pickle.OBJ, _obj),
                (pickle.BUILD, _build),
                (pickle.APPEND, _append),
                (pickle.APPENDS, _appends),
                (pickle.SETITEM, _setitem),
                (pickle.SETITEMS, _setitems),
                (pickle.DICT, _dict),
                (pickle.ADDITEMS, _additems),
                (pickle.FROZENSET, _frozenset),
                (pickle.PERSID, _persid),
                (pickle.BINPERSID, _binpersid),
                (pickle.INT, _int),
                (pickle.LONG, _long),
                (pickle.LONG1, _long1),
                (pickle.LONG4, _long4),
                (pickle.BYTEARRAY8, _bytearray8),
                (pickle.PUT, _put),
                (pickle.LONG_BINPUT, _long_binput),
                (pickle.EXT1, _ext),
                (pickle.EXT2, _ext),
                (pickle.EXT4, _ext),
            )
        },
    }


def _tuple(arguments: Any) -> tuple[Any, ...]:
    if type(arguments) is not tuple:
        raise TypeError(f"arguments in a {type(arguments).__name__}")
    return arguments
