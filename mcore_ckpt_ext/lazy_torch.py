"""Stand-ins for `torch` and `numpy` that import them on first use.

Commands that read no tensor run without them.

`import torch` takes a second and several hundred MiB (benchmarks/results), `import numpy` a twentieth. Modules that
work without a live job import these names from here, and use them in functions only.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as numpy
    import torch as torch
    from typing_extensions import TypeIs
else:

    class _LazyModule:
        """A stand-in for a module: the first attribute that is looked up imports it."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            # `import_module` is four times slower for a module that is imported already, and tensors are read in a
            # loop.
            return getattr(sys.modules.get(self._name) or import_module(self._name), name)

    torch = _LazyModule("torch")
    numpy = _LazyModule("numpy")


def is_tensor(value: object) -> TypeIs[torch.Tensor]:
    """Return True for a tensor; never imports torch, as no tensor exists before its import."""
    return _is_instance(value, "Tensor")


def is_dtype(value: object) -> TypeIs[torch.dtype]:
    """Return True for a `torch.dtype`."""
    return _is_instance(value, "dtype")


def is_size(value: object) -> TypeIs[torch.Size]:
    """Return True for a `torch.Size`."""
    return _is_instance(value, "Size")


def is_layout(value: object) -> TypeIs[torch.layout]:
    """Return True for a `torch.layout`, such as `torch.strided`."""
    return _is_instance(value, "layout")


def _is_instance(value: object, kind: str) -> bool:
    imported = sys.modules.get("torch")
    return imported is not None and isinstance(value, getattr(imported, kind))
