"""Installs and uninstalls the patches of frameworks, and reports their state.

``import torch`` imports this module at its end, where the entry point's own error handler does not catch errors,
so it stays this small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from mcore_ckpt_ext.patching.patch_point import PatchPointStatus
    from mcore_ckpt_ext.patching.registry import HookRegistry
    from mcore_ckpt_ext.settings import Setting

__all__ = ["install", "status", "uninstall"]


def install() -> None:
    """Patch every supported framework that is imported, and each other one when it is imported.

    A second call changes nothing. With ``MCORE_CKPT_EXT=0`` in the environment nothing is installed, so that an
    operator can switch the package off even if a script calls this function. A variable with an invalid value is
    reported.

    Example:
        >>> install()
        >>> {point.state for point in status()} <= {"patched", "waiting for import", "not patched"}
        True
    """
    from mcore_ckpt_ext.settings import SWITCH, invalid_settings

    if wrong := invalid_settings():
        _report(wrong)
    if SWITCH.value:
        _registry().install()


def uninstall() -> None:
    """Restore the functions of every framework; wrappers that others put on top keep working.

    Example:
        >>> uninstall()
        >>> any(point.state == "patched" for point in status())
        False
    """
    _registry().uninstall()


def status() -> list[PatchPointStatus]:
    """Report for each patch point that it waits for an import, is patched, or is not patched and why.

    Example:
        >>> [point.patch_point for point in status()][0]
        'megatron.training.checkpointing.load_checkpoint'
    """
    return _registry().status()


def _report(wrong: list[Setting[Any]]) -> None:
    from mcore_ckpt_ext.patching.log import announce

    for setting in wrong:
        announce(f"{setting.name}={setting.text}: invalid value, ignored; valid: {setting.meaning}")


def _registry() -> HookRegistry:
    """Return the registry of this process's patch points; the first call makes it."""
    from mcore_ckpt_ext.megatron.patch_points import PATCH_POINTS
    from mcore_ckpt_ext.patching.registry import HookRegistry
    from mcore_ckpt_ext.patching.singletons import PROCESS

    return PROCESS.one(HookRegistry, lambda: HookRegistry(PATCH_POINTS))
