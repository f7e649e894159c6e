"""Stubs for pickled classes that this package does not load; they store arguments and state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mcore_ckpt_ext.errors import UnsafePickleError, format_value

# Classes of the standard library that occur in checkpoints and that this package does not need.
_HARMLESS = {
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
    ("signal", "Signals"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("functools", "partial"),
    ("uuid", "UUID"),
    ("enum", "Enum"),
    ("copyreg", "_reconstructor"),
    ("builtins", "range"),
    ("__builtin__", "range"),
    ("__builtin__", "xrange"),  # a list of a range can fill any memory
}

# Modules that `sys.stdlib_module_names` lacks.
_SYSTEM_MODULES = {"__builtin__", "posix", "nt", "os2", "commands", "__main__"}


class PickleStub(type):
    """The metaclass of classes that a pickle can name. A pickle cannot set attributes of such a class."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"a pickle sets {name} of {cls.__name__}")


class Stateless(metaclass=PickleStub):
    """An object that a pickle may refer to, but whose state the pickle cannot set."""

    def __setstate__(self, state: object) -> None:
        raise TypeError(f"a pickle sets the state of a {type(self).__name__}")


class Function(Stateless):
    """A function that a pickle can name; the defaults of a plain Python function could be overwritten."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self._call(*arguments)


class MetadataStub(metaclass=PickleStub):
    """A stub for classes of torch's checkpoint metadata, which only stores attributes."""

    def __init__(self, *arguments: object) -> None:
        """Store the arguments; enum members are created from their value."""
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # Not copied, because a large checkpoint has hundreds of thousands of them.
        self.__dict__ = state

    def __repr__(self) -> str:
        # Without the attributes, which may refer to the object itself, or to one object a billion times.
        return f"<{type(self).__name__}>"


_MOST_PROPERTIES = 8
_STRIDES = 5
_MOST_STRIDES = 64
_NO_PROPERTIES = {tuple, int, float}  # types whose hash the writer of a file can choose


class TensorProperties(MetadataStub):
    """`torch.distributed.checkpoint.metadata.TensorProperties`; its state is a tuple, dtype first.

    Its `__getstate__` writes five properties in torch up to 2.13, and the strides as a sixth in 2.15. Strides may be a
    tuple of numbers: every tuple that reaches this class is small, or was checked to have a unique hash
    (`plain_pickle`).
    """

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        others = state
        if len(state) > _STRIDES and type(state[_STRIDES]) is tuple:
            strides = state[_STRIDES]
            others = (*state[:_STRIDES], *state[_STRIDES + 1 :])
            if len(strides) > _MOST_STRIDES or not {int}.issuperset(map(type, strides)):
                raise TypeError("the strides of a tensor are not all integers")
        if len(state) > _MOST_PROPERTIES or not _NO_PROPERTIES.isdisjoint(map(type, others)):  # see `plain_pickle`
            raise TypeError("the properties of a tensor have an invalid type")
        self.dtype = state[0]


class IgnoredStub(MetadataStub):
    """A part of the ranks' plans in the metadata, which this package does not need."""

    def __setstate__(self, state: object) -> None:
        """Discard the state."""
        if type(state) is not dict:  # as `plain_pickle` relies on
            raise TypeError(f"a {type(self).__name__} whose state is no dict")


class MetadataIndex(MetadataStub):
    """`torch.distributed.checkpoint.metadata.MetadataIndex`; those of objects have no offset."""

    offset: object = None


class StorageInfo(MetadataStub):
    """`torch.distributed.checkpoint.filesystem._StorageInfo`; its state lacks descriptors that are None."""

    transform_descriptors: object = None


# The last two are classes of `torch.distributed.checkpoint.planner`.
_METADATA_CLASSES: dict[str, type[MetadataStub]] = {
    "TensorProperties": TensorProperties,
    "MetadataIndex": MetadataIndex,
    "_StorageInfo": StorageInfo,
    "WriteItem": IgnoredStub,
    "TensorWriteData": IgnoredStub,
}


@lru_cache(maxsize=1024)
def metadata_class(name: str) -> type[MetadataStub]:
    """Return the stub of a class of torch's checkpoint metadata."""
    return _METADATA_CLASSES.get(name) or type(name, (MetadataStub,), {})


class Placeholder(metaclass=PickleStub):
    """An instance of a class that is not loaded: it stores its arguments and state, and has no behavior.

    `pickling.dumps` writes it as it was read.
    """

    pickled_module = ""
    pickled_name = ""
    arguments: tuple[object, ...]
    _origin: Origin

    def __new__(cls, *arguments: object, **keywords: object) -> Placeholder:
        """Store the constructor's arguments; enum members are created from their value."""
        self = super().__new__(cls)
        self.arguments = arguments
        self._origin = Origin()
        return self

    def __init__(self, *arguments: object, **keywords: object) -> None:
        """Accept any arguments."""
        self._origin.called = True

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if key != "_origin"})
        self._origin.state = (state,)

    def append(self, item: object) -> None:
        """Store an item of a pickled subclass of list."""
        self._origin.items.append(item)

    def extend(self, items: list[object]) -> None:
        """Store items of a pickled subclass of list."""
        self._origin.items.extend(items)

    def __setitem__(self, key: object, value: object) -> None:
        self._origin.entries.append((key, value))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a placeholder as a placeholder, never as the class that it represents."""
        return _again, (self.pickled_module, self.pickled_name, vars(self))

    def __repr__(self) -> str:
        return f"<{self.pickled_module}.{self.pickled_name} {format_value(self.arguments)}>"


class Origin:
    """How a pickle built a placeholder: by a call, by `__new__` alone, or as attribute of a class.

    `member` is the name of the attribute. `state` is the argument of `__setstate__`, if it was called; `items` were
    appended, and `entries` were set.
    """

    def __init__(self) -> None:
        self.called = False
        self.member: str | None = None
        self.state: tuple[object, ...] = ()
        self.items: list[object] = []
        self.entries: list[tuple[object, object]] = []


def origin_of(placeholder: Placeholder) -> Origin:
    """Return the origin of a placeholder."""
    return placeholder._origin


def _again(module: str, name: str, content: dict[str, Any]) -> Placeholder:
    placeholder = placeholder_class(module, name)()
    vars(placeholder).update(content)
    return placeholder


@lru_cache(maxsize=1024)
def placeholder_class(module: str, name: str) -> type[Placeholder]:
    """Return the placeholder class for `module.name`."""
    names = {"pickled_module": module, "pickled_name": name}
    return type(name.rpartition(".")[2], (Placeholder,), names)


def stub_class(module: str, name: str, where: str) -> type[Placeholder]:
    """Return the placeholder class for a class that is not loaded.

    Raises:
        UnsafePickleError: the name is invalid, or a function that no checkpoint needs.
    """
    if not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise UnsafePickleError(
            "invalid class name in a pickle",
            found=repr(f"{module}.{name}"[:200]),
            where=where,
            hint="do not use this file: it may be an attack",
        )
    top = module.partition(".")[0]
    if (top in sys.stdlib_module_names or top in _SYSTEM_MODULES) and (module, name) not in _HARMLESS:
        raise UnsafePickleError(
            "a pickle requests a function that no checkpoint needs; nothing was executed",
            found=f"{module}.{name}",
            where=where,
            hint="do not use this file: it may be an attack",
        )
    return placeholder_class(module, name)
