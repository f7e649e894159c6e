"""Former location of `install`, `uninstall` and `status`, which are in `mcore_ckpt_ext` now."""

from __future__ import annotations

from mcore_ckpt_ext.former_names import renamed


def __getattr__(name: str) -> object:
    """Return a function by its former import path, with a warning."""
    if name not in ("install", "uninstall", "status"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return renamed("mcore_ckpt_ext", f"{__name__}.{name}", name)
