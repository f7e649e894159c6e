"""Stand-ins for classes that a pickle names but this package does not load: they keep what is said and do nothing."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from mcore_ckpt_ext.errors import UnsafePickleError, format_value

# Classes of the standard library that stand in checkpoints and mean nothing to us.
_HARMLESS = {
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"),
    ("signal", "Signals"), ("datetime", "datetime"), ("datetime", "timedelta"), ("functools", "partial"),
    ("uuid", "UUID"), ("enum", "Enum"), ("copyreg", "_reconstructor"),
    ("builtins", "range"), ("__builtin__", "range"), ("__builtin__", "xrange"),  # a list of one can fill any memory
}  # fmt: skip

# `sys.stdlib_module_names` has those of this platform's sources only in part.
_SYSTEM_MODULES = {"__builtin__", "posix", "nt", "os2", "commands", "__main__"}


class PickleStub(type):
    """The metaclass of what a pickle finds by name: it outlives the pickle, which may not set its attributes."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"a pickle sets {name} of {cls.__name__}")


class Stateless(metaclass=PickleStub):
    """An object that a pickle may refer to, but whose state it may not set."""

    def __setstate__(self, state: object) -> None:
        raise TypeError(f"a pickle sets the state of a {type(self).__name__}")


class Record(metaclass=PickleStub):
    """An object known only by its attributes; it stands for every class of torch's checkpoint metadata."""

    def __init__(self, *arguments: object) -> None:
        """Members of an enum are made this way, from their value."""
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # Kept as it is, not copied: a large checkpoint has hundreds of thousands of records.
        self.__dict__ = state

    def __repr__(self) -> str:
        # Not its contents, which may refer to itself, or to one thing a billion times.
        return f"<{type(self).__name__}>"


_MOST_PROPERTIES, _STRIDES, _MOST_STRIDES = 8, 5, 64
_NO_PROPERTIES = {tuple, int, float}  # whose hash the writer of a file can choose


class TensorProperties(Record):
    """`torch.distributed.checkpoint.metadata.TensorProperties`, whose state is a tuple that begins with the dtype.

    Its `__getstate__` writes five properties in torch up to 2.13; 2.15 writes the strides as a sixth. They may be a
    tuple of numbers: any that reaches this class is small, or was found to have a hash of its own (`plain_pickle`).
    """

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        others = state
        if len(state) > _STRIDES and type(state[_STRIDES]) is tuple:
            strides, others = state[_STRIDES], (*state[:_STRIDES], *state[_STRIDES + 1 :])
            if len(strides) > _MOST_STRIDES or not {int}.issuperset(map(type, strides)):
                raise TypeError("strides of a tensor with something else among them")
        if len(state) > _MOST_PROPERTIES or not _NO_PROPERTIES.isdisjoint(map(type, others)):  # see `plain_pickle`
            raise TypeError("properties of a tensor with something else among them")
        self.dtype = state[0]


class Unread(Record):
    """A part of the ranks' plans, which the metadata keep beside what came of them, and which nobody reads."""

    def __setstate__(self, state: object) -> None:
        """Forget it."""
        if type(state) is not dict:  # as `plain_pickle` counts on
            raise TypeError(f"a {type(self).__name__} whose state is no dict")


# `torch.distributed.checkpoint.planner` has the last two.
_RECORD_CLASSES: dict[str, type[Record]] = {
    "TensorProperties": TensorProperties, "WriteItem": Unread, "TensorWriteData": Unread,
}  # fmt: skip


@lru_cache(maxsize=1024)
def record_class(name: str) -> type[Record]:
    """The class that stands for one of torch's checkpoint metadata."""
    return _RECORD_CLASSES.get(name) or type(name, (Record,), {})


class Placeholder(metaclass=PickleStub):
    """An instance of a class that is not loaded: it keeps what the pickle said about it, and does nothing.

    `pickling.dumps` writes it back as it was read.
    """

    pickled_module = ""
    pickled_name = ""
    arguments: tuple[object, ...]
    _origin: Origin

    def __new__(cls, *arguments: object, **keywords: object) -> Placeholder:
        """Keep the constructor's arguments; members of an enum are made this way, from their value."""
        self = super().__new__(cls)
        self.arguments = arguments
        self._origin = Origin()
        return self

    def __init__(self, *arguments: object, **keywords: object) -> None:
        """Accept anything."""
        self._origin.called = True

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if key != "_origin"})
        self._origin.state = (state,)

    def append(self, item: object) -> None:
        """For pickled subclasses of list."""
        self._origin.items.append(item)

    def extend(self, items: list[object]) -> None:
        """For pickled subclasses of list."""
        self._origin.items.extend(items)

    def __setitem__(self, key: object, value: object) -> None:
        self._origin.entries.append((key, value))

    def __reduce__(self) -> tuple[Any, ...]:
        """Saved again by whoever read it here, it remains a placeholder, and never becomes what it stands for."""
        return _again, (self.pickled_module, self.pickled_name, vars(self))

    def __repr__(self) -> str:
        return f"<{self.pickled_module}.{self.pickled_name} {format_value(self.arguments)}>"


class Origin:
    """How a pickle built a placeholder: by a call or by `__new__` alone, or as the attribute `member` of a class.

    `state` holds what `__setstate__` got, if anything; `items` and `entries` what was appended and set.
    """

    def __init__(self) -> None:
        self.called = False
        self.member: str | None = None
        self.state: tuple[object, ...] = ()
        self.items: list[object] = []
        self.entries: list[tuple[object, object]] = []


def origin_of(placeholder: Placeholder) -> Origin:
    """The source of a placeholder."""
    return placeholder._origin


def _again(module: str, name: str, content: dict[str, Any]) -> Placeholder:
    placeholder = placeholder_class(module, name)()
    vars(placeholder).update(content)
    return placeholder


@lru_cache(maxsize=1024)
def placeholder_class(module: str, name: str) -> type[Placeholder]:
    """The class that stands for `module.name`."""
    names = {"pickled_module": module, "pickled_name": name}
    return type(name.rpartition(".")[2], (Placeholder,), names)


def inert_class(module: str, name: str, where: str) -> type[Placeholder]:
    """The class that stands for one that is not loaded.

    Raises:
        UnsafePickleError: it is no class, but what no checkpoint needs.
    """
    if not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise UnsafePickleError(
            "invalid class name in a pickle", found=repr(f"{module}.{name}"[:200]), where=where,
            hint="do not use this file: it may be an attack",
        )  # fmt: skip
    top = module.partition(".")[0]
    if (top in sys.stdlib_module_names or top in _SYSTEM_MODULES) and (module, name) not in _HARMLESS:
        raise UnsafePickleError(
            "a pickle requests a function that no checkpoint needs; nothing was executed",
            found=f"{module}.{name}",
            where=where,
            hint="do not use this file: it may be an attack",
        )
    return placeholder_class(module, name)
