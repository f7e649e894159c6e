"""Wraps functions of frameworks that may not be imported yet, and restores them.

The rules: a function that does not look as expected is left alone, and the reason is recorded; an error in this module
never reaches the framework; other packages may wrap the function before or after and keep working.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from mcore_ckpt_ext.patching.import_hook import PostImportFinder
from mcore_ckpt_ext.patching.log import is_logging_rank, own_logger
from mcore_ckpt_ext.patching.patch_point import (
    Function,
    PatchPoint,
    PatchPointMismatchError,
    PatchPointStatus,
    Place,
    checked_function,
    is_imported,
    is_older_than,
    may_be_imported,
    place_in,
    version_of,
)


class _Patch:
    """One wrapped function: the original, the replacement, and a switch.

    ``dispatch`` stays harmless forever: once switched off it calls the original, so another package's wrapper on top of
    it, or a reference that cannot be found, still works after `uninstall`.
    """

    def __init__(self, place: Place, original: Function, replacement: Function, raises: tuple[str, ...]) -> None:
        self.place = place
        self.original = original
        self.active = True

        @functools.wraps(original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            try:
                return replacement(*args, **kwargs)
            except BaseException as error:
                if raises:
                    from mcore_ckpt_ext.patching.replaced_errors import add_replaced_types

                    add_replaced_types(error, raises)
                raise

        self.dispatch = dispatch

    def apply(self) -> None:
        """Replace the original by the wrapper."""
        self._rebind(self.original, self.dispatch)

    def undo(self) -> None:
        """Restore the original wherever the wrapper is found.

        Other references to the wrapper call the original.
        """
        self.active = False
        self._rebind(self.dispatch, self.original)

    def _rebind(self, before: Function, after: Function) -> None:
        owner_name, _, name = self.place.attribute.rpartition(".")
        if not owner_name:
            _rebind(self.place.module, name, before, after)
            return
        owner = getattr(self.place.module, owner_name)
        held = vars(owner).get(name)
        if isinstance(held, staticmethod) and held.__func__ is before:
            setattr(owner, name, staticmethod(after))
        elif held is before:
            setattr(owner, name, after)


class HookRegistry:
    """Keeps a fixed list of patch points wrapped, from ``install`` to ``uninstall``.

    Thread-safe. The lock only protects the registry's own data and is never held during an import, so it cannot
    deadlock with the import system's locks.
    """

    def __init__(self, patch_points: Sequence[PatchPoint]) -> None:
        self._patch_points = tuple(patch_points)
        modules = {module for patch_point in self._patch_points for module in patch_point.modules}
        self._finder = PostImportFinder(modules, self._handle_import)
        self._lock = threading.RLock()
        self._installed = False
        self._patches: dict[PatchPoint, list[_Patch]] = {}
        self._reasons: dict[PatchPoint, str] = {}
        self._absent: dict[PatchPoint, str] = {}

    def install(self) -> None:
        """Wrap the patch points of imported modules, and watch for the others; a second call is harmless."""
        with self._lock:
            self._installed = True
            if self._finder not in sys.meta_path:
                sys.meta_path.insert(0, self._finder)
            late = [
                (patch_point, name, sys.modules[name])
                for patch_point in self._patch_points
                if patch_point not in self._patches
                for name in patch_point.modules
                if name in sys.modules
            ]
        self._patch(late)

    def uninstall(self) -> None:
        """Restore every original, and stop watching."""
        with self._lock:
            self._installed = False
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            for patches in self._patches.values():
                for patch in patches:
                    patch.undo()
            self._patches.clear()
            self._reasons.clear()
            self._absent.clear()

    def status(self) -> list[PatchPointStatus]:
        """Report the state of each patch point, in the order of the patch points."""
        with self._lock:
            return [self._status(patch_point) for patch_point in self._patch_points]

    def _handle_import(self, name: str, module: ModuleType) -> None:
        self._patch([(patch_point, name, module) for patch_point in self._patch_points if name in patch_point.modules])

    def _patch(self, imported: Iterable[tuple[PatchPoint, str, ModuleType]]) -> None:
        """Wrap patch points; record failures, and log one line for each reason.

        A function that cannot be wrapped stays unchanged.
        """
        failed: dict[str, list[str]] = {}
        for patch_point, name, module in imported:
            reason = self._patch_one(patch_point, name, module)
            if reason is not None:
                failed.setdefault(reason, []).append(str(patch_point))
        if is_logging_rank():
            for reason, names in failed.items():
                verb = "is left as it is" if len(names) == 1 else "are left as they are"
                own_logger().warning("%s %s: %s", ", ".join(names), verb, reason)

    def _patch_one(self, patch_point: PatchPoint, name: str, module: ModuleType) -> str | None:
        """Wrap one patch point in a module that has just been imported under a name.

        Returns:
            The reason why it is not wrapped; None if it is, if there is nothing to wrap, or if this reason was logged
            before.
        """
        try:
            place = place_in(patch_point, name, module)
            if place is None:
                self._pass_over(patch_point, name)
                return None
            original = checked_function(patch_point, place)
            if not self._is_ours(patch_point, original):
                wrappers, _, wrap = patch_point.wrapper.partition(":")
                replacement = getattr(import_module(wrappers), wrap)(original)
                if not callable(replacement):
                    raise PatchPointMismatchError(
                        f"{patch_point.wrapper} returned {replacement!r}, which is not callable"
                    )
                self._commit(patch_point, _Patch(place, original, replacement, patch_point.raises))
        except Exception as error:  # noqa: BLE001 - a failing hook must not break the framework's import
            return self._refuse(patch_point, error)
        return None

    def _pass_over(self, patch_point: PatchPoint, name: str) -> None:
        """Accept a module without the function, if another may have it, or no module of this release has it.

        Raises:
            PatchPointMismatchError: the function is missing.
        """
        if is_imported(patch_point) or any(map(may_be_imported, patch_point.modules)):
            return
        attributes = patch_point.attributes(name)
        version = version_of(patch_point)
        if not all(is_older_than(version, attribute) for attribute in attributes):
            raise PatchPointMismatchError(f"{name} has no function {' or '.join(attributes)}")
        with self._lock:
            self._absent[patch_point] = "this release has no such function, and needs none"

    def _commit(self, patch_point: PatchPoint, patch: _Patch) -> None:
        with self._lock:
            # Another thread may have uninstalled or patched in the meantime.
            if self._installed and patch.place.function() is patch.original:
                patch.apply()
                self._patches.setdefault(patch_point, []).append(patch)
                self._reasons.pop(patch_point, None)

    def _refuse(self, patch_point: PatchPoint, error: Exception) -> str | None:
        """Record why a patch point is not wrapped; return the reason if it is a new one."""
        reason = str(error) if isinstance(error, PatchPointMismatchError) else f"{type(error).__name__}: {error}"
        with self._lock:
            is_known = self._reasons.get(patch_point) == reason
            self._reasons[patch_point] = reason
        return None if is_known else reason

    def _is_ours(self, patch_point: PatchPoint, function: Function) -> bool:
        with self._lock:
            return any(patch.dispatch is function for patch in self._patches.get(patch_point, ()))

    def _status(self, patch_point: PatchPoint) -> PatchPointStatus:
        version = version_of(patch_point)
        if patch_point in self._reasons:
            return PatchPointStatus(str(patch_point), "not patched", version, self._reasons[patch_point])
        if patch_point in self._patches:
            return PatchPointStatus(str(patch_point), "patched", version, self._patch_on_top(patch_point))
        if not self._installed:
            return PatchPointStatus(str(patch_point), "not patched", version, "the hooks are not installed")
        if patch_point in self._absent:
            return PatchPointStatus(str(patch_point), "not needed", version, self._absent[patch_point])
        if all(module in sys.modules for module in patch_point.modules):
            return PatchPointStatus(
                str(patch_point),
                "not patched",
                version,
                "it was imported before the hooks were installed, or is being imported",
            )
        return PatchPointStatus(str(patch_point), "waiting for import", version)

    def _patch_on_top(self, patch_point: PatchPoint) -> str | None:
        """Return the name of another package's wrapper on top of ours; None if there is none."""
        patch = self._patches[patch_point][-1]
        current = patch.place.function()
        if current is patch.dispatch:
            return None
        place = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', repr(current))}"
        return f"wrapped by another package: {place}"


def _rebind(own_module: ModuleType, attribute: str, before: Function, after: Function) -> None:
    """Replace a function in its module, and in every module that imported it by name.

    Megatron's training.py does ``from .checkpointing import load_checkpoint`` (0.7.0 to 0.19.2). Only the same name
    counts: under another name, a program may keep the original on purpose. The namespace is read and written directly
    on the object, since some modules in ``sys.modules`` import other modules on attribute access. Objects that only
    pretend to be modules, such as libraries of cffi, have no namespace.
    """
    for module in [own_module, *list(sys.modules.values())]:
        if issubclass(type(module), ModuleType):
            namespace = object.__getattribute__(module, "__dict__")
            if namespace.get(attribute) is before:
                namespace[attribute] = after
