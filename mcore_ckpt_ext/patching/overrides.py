"""Gives a name of a framework another value for the duration of a call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from mcore_ckpt_ext.patching.patch_point import Function

Scope = MutableMapping[str, Any]
"""The globals of a framework's module, such as Megatron's `checkpointing`."""


def scope_of(function: Function) -> Scope:
    """Return the globals of a function's module, beneath other wrappers of it."""
    scope: Scope = inspect.unwrap(function).__globals__
    return scope


@contextmanager
def overridden(namespace: Scope, **values: Any) -> Iterator[None]:
    """Give existing names other values within this scope, and restore the former values.

    Args:
        namespace: the globals of a module, or the `vars` of its arguments.
        values: the values within the scope.

    Raises:
        KeyError: a name does not exist; nothing has changed.
    """
    before = {name: namespace[name] for name in values}
    namespace.update(values)
    try:
        yield
    finally:
        namespace.update(before)
