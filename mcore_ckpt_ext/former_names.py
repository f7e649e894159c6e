"""Former names of public classes and functions, which keep working."""

from __future__ import annotations

import warnings
from importlib import import_module


def renamed(module: str, former: str, name: str) -> object:
    """Return the object that a module offered under a former name, and warn with the new name.

    A module calls it in its `__getattr__`.

    Args:
        module: the module that defines the object now.
        former: the former name.
        name: the name in that module now.
    """
    warnings.warn(f"{former} is now {name} of {module}", DeprecationWarning, stacklevel=3)
    found: object = getattr(import_module(module), name)
    return found
