"""Former location of `install`, `uninstall` and `status`, which `mcore_ckpt_ext` itself offers."""

from __future__ import annotations

import warnings

_MOVED = ("install", "uninstall", "status")


def __getattr__(name: str) -> object:
    """Return a moved function, with a warning that names its new place."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"import {name} from mcore_ckpt_ext, not from {__name__}", DeprecationWarning, stacklevel=2)
    from mcore_ckpt_ext.megatron import installation

    value: object = getattr(installation, name)
    return value
