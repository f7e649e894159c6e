"""Resume a Megatron-LM checkpoint, optimizer included, under another TP x PP layout.

Importing this package costs next to nothing and imports neither torch nor a framework: torch itself
imports it at the end of ``import torch`` (the ``torch.backends`` entry point). So every public name is
looked up when it is first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
    from mcore_ckpt_ext.hooks import install, status, uninstall
    from mcore_ckpt_ext.offline.conversion import convert

__version__ = "0.1.0"

__all__ = ["__version__", "convert", "install", "open_checkpoint", "status", "uninstall"]

_HOMES = {
    "convert": "mcore_ckpt_ext.offline.conversion",
    "install": "mcore_ckpt_ext.hooks",
    "open_checkpoint": "mcore_ckpt_ext.formats.checkpoint",
    "status": "mcore_ckpt_ext.hooks",
    "uninstall": "mcore_ckpt_ext.hooks",
}


def __getattr__(name: str) -> object:
    """Import the module that holds a public name, on the first use of that name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names beside those that are already there."""
    return sorted({*globals(), *__all__})
