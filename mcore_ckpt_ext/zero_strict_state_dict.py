"""Give ColossalAI's ZeroDDP and GeminiDDP the state dict and the strict loading of a PyTorch module.

    from mcore_ckpt_ext import zero_strict_state_dict
    zero_strict_state_dict.install()          # or install(dtype="compute")

Importing this module imports neither ColossalAI nor torch; every public name is looked up when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from mcore_ckpt_ext.colossalai.loading import StateDictMismatchError, zero_strict_load_state_dict
    from mcore_ckpt_ext.colossalai.shards import iter_zero_strict_state_dict
    from mcore_ckpt_ext.colossalai.state import get_static_torch_model, zero_strict_state_dict

    # A type checker sees Any: `installation` is above this layer, and the subclasses derive from ColossalAI's classes.
    StrictGeminiDDP: Any
    StrictGeminiOptimizer: Any
    install: Any
    status: Any
    uninstall: Any

__all__ = [
    "StateDictMismatchError",
    "StrictGeminiDDP",
    "StrictGeminiOptimizer",
    "get_static_torch_model",
    "install",
    "iter_zero_strict_state_dict",
    "status",
    "uninstall",
    "zero_strict_load_state_dict",
    "zero_strict_state_dict",
]

_IMPLEMENTATION = "mcore_ckpt_ext.colossalai"
_HOOKS = "mcore_ckpt_ext.colossalai.installation"
_MODULES = {
    "StateDictMismatchError": f"{_IMPLEMENTATION}.loading",
    "zero_strict_load_state_dict": f"{_IMPLEMENTATION}.loading",
    "iter_zero_strict_state_dict": f"{_IMPLEMENTATION}.shards",
    "get_static_torch_model": f"{_IMPLEMENTATION}.state",
    "zero_strict_state_dict": f"{_IMPLEMENTATION}.state",
    "install": _HOOKS,
    "status": _HOOKS,
    "uninstall": _HOOKS,
}
_SUBCLASSES = {"StrictGeminiDDP": "WRAPPER", "StrictGeminiOptimizer": "OPTIMIZER"}


def __getattr__(name: str) -> object:
    """Import the module that holds a public name, on the first use of that name."""
    value: object
    if name in _SUBCLASSES:
        classes = import_module(f"{_IMPLEMENTATION}.classes")
        value = classes.strict_subclass(getattr(classes, _SUBCLASSES[name]), name)
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names and the names that exist already."""
    return sorted({*globals(), *__all__})
