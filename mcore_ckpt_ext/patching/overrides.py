"""A name of the framework means something else for the duration of a call, whatever happens in it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def overridden(namespace: MutableMapping[str, Any], **values: Any) -> Iterator[None]:
    """Give existing names other values, and restore what they had.

    Args:
        namespace: the globals of a module, or the `vars` of its arguments.
        values: what they mean within.

    Raises:
        KeyError: a name is not there; nothing has changed.
    """
    before = {name: namespace[name] for name in values}
    namespace.update(values)
    try:
        yield
    finally:
        namespace.update(before)
