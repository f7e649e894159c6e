"""Lets checkouts of ColossalAI 0.2 and 0.3 be imported beside today's Python and torch, on a machine without a GPU.

Call ``install`` before the first import of ColossalAI. What it puts right: modules that torch has since dropped, a
rule of dataclasses that Python 3.11 brought, and kernels that 0.2 compiles when it is imported.
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
    """A module with any builder one asks for; none of them builds anything."""

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
    """A ``dataclass`` that takes defaults without a hash, as Python did before 3.11, where they are ColossalAI's."""

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
    """Make ``import colossalai`` find the checkout, and what it needs."""
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
