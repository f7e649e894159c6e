"""Former names of public classes and functions, which keep working."""

from __future__ import annotations

import warnings
from importlib import import_module


def renamed(module: str, former: str, name: str) -> object:
    """Return what a module offered under a former name, for its `__getattr__`, with a warning that names the new one.

    Args:
        module: where it is now.
        former: what it was called.
        name: what it is called there now.
    """
    warnings.warn(f"{former} is now {name} of {module}", DeprecationWarning, stacklevel=3)
    found: object = getattr(import_module(module), name)
    return found
