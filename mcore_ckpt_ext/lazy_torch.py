"""`torch`, imported when something of it is first used: a command that reads no tensor runs without it.

`import torch` takes a second and several hundred MiB (benchmarks/README.md). A module that works without a live job
imports the name `torch` from here, and uses it in functions only.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from typing_extensions import TypeIs
else:

    class _LazyTorch:
        """Stands for the module: the first attribute that is looked up imports it."""

        def __getattr__(self, name: str) -> Any:
            # `import_module` takes four times as long to find what is imported, and tensors are read in a loop.
            return getattr(sys.modules.get("torch") or import_module("torch"), name)

    torch = _LazyTorch()


def is_tensor(value: object) -> TypeIs[torch.Tensor]:
    """True for a tensor of torch; like the functions below, it imports nothing: nothing is one before the import."""
    return _is_instance(value, "Tensor")


def is_dtype(value: object) -> TypeIs[torch.dtype]:
    """True for a dtype of torch."""
    return _is_instance(value, "dtype")


def is_size(value: object) -> TypeIs[torch.Size]:
    """True for a shape as torch has it."""
    return _is_instance(value, "Size")


def is_layout(value: object) -> TypeIs[torch.layout]:
    """True for a layout of a tensor's elements in memory, such as `torch.strided`."""
    return _is_instance(value, "layout")


def _is_instance(value: object, kind: str) -> bool:
    imported = sys.modules.get("torch")
    return imported is not None and isinstance(value, getattr(imported, kind))
