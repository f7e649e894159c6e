"""The edge towards the frameworks: put the hooks in place, take them away, report their state.

This module is imported at the end of every ``import torch``, outside the reach of the entry point's
own catch-all, so it stays this small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_ckpt_ext.patching.registry import HookRegistry, PatchPointStatus

__all__ = ["install", "status", "uninstall"]


def install() -> None:
    """Serve every supported framework, imported already or imported later.

    A second call changes nothing. With ``MCORE_CKPT_EXT=0`` in the environment nothing is installed,
    so that an operator can switch the package off under a script that calls this by hand.

    Example:
        >>> install()
        >>> {point.state for point in status()} <= {"patched", "waiting for import", "not patched"}
        True
    """
    from mcore_ckpt_ext.settings import SWITCH

    if SWITCH.value:
        _registry().install()


def uninstall() -> None:
    """Give every framework its own functions back; wrappers that others put on top keep working.

    Example:
        >>> uninstall()
        >>> any(point.state == "patched" for point in status())
        False
    """
    _registry().uninstall()


def status() -> list[PatchPointStatus]:
    """Report for each patch point whether it waits for an import, is patched, or is not patched and why.

    Example:
        >>> [point.patch_point for point in status()][0]
        'megatron.training.checkpointing.load_checkpoint'
    """
    return _registry().status()


def _registry() -> HookRegistry:
    """Return the wrapped patch points of the process, noted on first use."""
    from mcore_ckpt_ext.megatron.patch_points import PATCH_POINTS
    from mcore_ckpt_ext.patching.registry import HookRegistry
    from mcore_ckpt_ext.patching.singletons import PROCESS

    return PROCESS.one(HookRegistry, lambda: HookRegistry(PATCH_POINTS))
