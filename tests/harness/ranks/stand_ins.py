"""Empty stand-ins for packages that a framework imports and that need a GPU, or that these tests do not use."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Anything(type):
    """A class that has every attribute, each of which is such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __getitem__(cls, key: object) -> Any:
        return cls


def _anything(name: str) -> Any:
    return _Anything(name, (), {"__init__": lambda self, *_, **__: None, "__call__": lambda self, *_, **__: None})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _anything(name)
        setattr(self, name, found)
        return found


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder that comes last, so that installed packages take precedence."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if any(name == own or name.startswith(f"{own}.") for own in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "99.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def stand_in_for(*names: str) -> None:
    """Make packages importable that are missing, or hidden from jobs on CPU ranks; they do nothing."""
    finder = _StandIns(names)
    sys.meta_path.append(finder)
    for name in names:
        if name in sys.modules and sys.modules[name] is None:  # hidden: engine_kernels.py
            sys.modules[name] = importlib.util.module_from_spec(finder.find_spec(name))
