"""Makes checkouts of ColossalAI 0.2 and 0.3 importable with current Python and torch, without a GPU.

Call ``install`` before the first import of ColossalAI. It provides modules that torch has removed, relaxes a rule of
dataclasses since Python 3.11, and replaces kernels that 0.2 compiles on import.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from colossalai_on_cpu import redirect

_KERNELS = "colossalai.kernel.op_builder"


class _Kernels(types.ModuleType):
    """A module with builders of any name, which build nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"load": lambda _: types.SimpleNamespace()})


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(_KERNELS):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _lenient(dataclass: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``dataclass`` that accepts unhashable defaults of ColossalAI, as Python did before 3.11."""

    def decorate(cls: type) -> type:
        for default in list(vars(cls).values()):
            kind = type(default)
            if kind.__module__.startswith("colossalai") and kind.__hash__ is None:
                kind.__hash__ = object.__hash__
        return cls

    def replacement(cls: type | None = None, **options: Any) -> Any:
        if cls is None:
            return lambda later: dataclass(decorate(later), **options)
        return dataclass(decorate(cls), **options)

    return replacement


def install(checkout: Path) -> None:
    """Make ``import colossalai`` find the checkout and its requirements."""
    sys.path.insert(0, str(checkout))
    sys.meta_path.insert(0, _KernelFinder())
    dropped: Any = types.ModuleType("torch._six")
    dropped.inf, dropped.string_classes, dropped.int_classes = float("inf"), (str,), (int,)
    dropped.container_abcs = collections.abc
    sys.modules["torch._six"] = dropped
    dataclasses.dataclass = _lenient(dataclasses.dataclass)  # type: ignore[assignment]
    torch.set_num_threads(1)
    redirect.redirect_torch()
    torch.cuda.Stream = redirect.Stream  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *_: redirect.Stream()  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
