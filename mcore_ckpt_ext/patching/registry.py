"""Wraps functions of frameworks that may not be imported yet, and restores them.

The rules: a function that does not look as expected is left alone, and the reason is recorded; an error in this module
never reaches the framework; other packages may wrap the function before or after and keep working.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple

from mcore_ckpt_ext.patching.import_hook import PostImportFinder
from mcore_ckpt_ext.patching.log import is_logging_rank, own_logger

Function = Callable[..., Any]
State = Literal["waiting for import", "patched", "not patched"]


class PatchPoint(NamedTuple):
    """One function of a framework that this package wraps.

    It is a named tuple, since every ``import torch`` pays for this class, and a dataclass takes ten times as long to
    make.

    Args:
        module: full dotted name of the module that defines it.
        attribute: its name there, ``Class.method`` for a method.
        wrapper: "module:function" of the factory that takes the original and returns its replacement;
            imported only after the framework's module.
        parameters: names that the original must accept, in this order; there may be others in between.
        version_module: the module whose ``__version__`` is the framework's version.
        raises: types of errors that the original raises, as "module:class". If the wrapper raises an error of this
            package, that error becomes an instance of them (see `replaced_errors`).
    """

    module: str
    attribute: str
    wrapper: str
    parameters: tuple[str, ...] = ()
    version_module: str | None = None
    raises: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


class PatchPointStatus(NamedTuple):
    """The state of one patch point.

    Attributes:
        patch_point: the function, with its module.
        state: whether it is patched.
        version: the framework's version, or None if it is not imported.
        reason: why it is not patched, or None.
    """

    patch_point: str
    state: State
    version: str | None = None
    reason: str | None = None


class PatchPointMismatchError(Exception):
    """A framework's function does not have the expected form."""


class _Patch:
    """One wrapped function: the original, the replacement, and a switch.

    ``dispatch`` stays harmless forever: once switched off it calls the original, so another package's wrapper on top of
    it, or a reference that cannot be found, still works after `uninstall`.
    """

    def __init__(self, patch_point: PatchPoint, original: Function, replacement: Function) -> None:
        self._class, _, self.attribute = patch_point.attribute.rpartition(".")
        self.original = original
        self.active = True

        @functools.wraps(original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            try:
                return replacement(*args, **kwargs)
            except BaseException as error:
                if patch_point.raises:
                    from mcore_ckpt_ext.patching.replaced_errors import add_replaced_types

                    add_replaced_types(error, patch_point.raises)
                raise

        self.dispatch = dispatch

    def apply(self, module: ModuleType) -> None:
        """Replace the original by the wrapper."""
        self._rebind(module, self.original, self.dispatch)

    def undo(self, module: ModuleType) -> None:
        """Restore the original wherever the wrapper is found.

        Other references to the wrapper call the original.
        """
        self.active = False
        self._rebind(module, self.dispatch, self.original)

    def _rebind(self, module: ModuleType, before: Function, after: Function) -> None:
        if not self._class:
            _rebind(module, self.attribute, before, after)
            return
        owner = getattr(module, self._class)
        held = vars(owner).get(self.attribute)
        if isinstance(held, staticmethod) and held.__func__ is before:
            setattr(owner, self.attribute, staticmethod(after))
        elif held is before:
            setattr(owner, self.attribute, after)


class HookRegistry:
    """Keeps a fixed list of patch points wrapped, from ``install`` to ``uninstall``.

    Thread-safe. The lock only protects the registry's own data and is never held during an import, so it cannot
    deadlock with the import system's locks.
    """

    def __init__(self, patch_points: Sequence[PatchPoint]) -> None:
        self._patch_points = tuple(patch_points)
        self._finder = PostImportFinder({patch_point.module for patch_point in self._patch_points}, self._after_import)
        self._lock = threading.RLock()
        self._installed = False
        self._patches: dict[PatchPoint, list[tuple[ModuleType, _Patch]]] = {}
        self._reasons: dict[PatchPoint, str] = {}

    def install(self) -> None:
        """Wrap the patch points of imported modules, and watch for the others; a second call is harmless."""
        with self._lock:
            self._installed = True
            if self._finder not in sys.meta_path:
                sys.meta_path.insert(0, self._finder)
            late = [
                patch_point
                for patch_point in self._patch_points
                if patch_point not in self._patches and patch_point.module in sys.modules
            ]
        self._patch([(patch_point, sys.modules[patch_point.module]) for patch_point in late])

    def uninstall(self) -> None:
        """Restore every original, and stop watching."""
        with self._lock:
            self._installed = False
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            for patches in self._patches.values():
                for module, patch in patches:
                    patch.undo(module)
            self._patches.clear()
            self._reasons.clear()

    def status(self) -> list[PatchPointStatus]:
        """Report the state of each patch point, in the order of the patch points."""
        with self._lock:
            return [self._status(patch_point) for patch_point in self._patch_points]

    def _after_import(self, name: str, module: ModuleType) -> None:
        self._patch([(patch_point, module) for patch_point in self._patch_points if patch_point.module == name])

    def _patch(self, found: Iterable[tuple[PatchPoint, ModuleType]]) -> None:
        """Wrap patch points; record failures, and log one line for each reason.

        A function that cannot be wrapped stays unchanged.
        """
        failed: dict[str, list[str]] = {}
        for patch_point, module in found:
            reason = self._patch_one(patch_point, module)
            if reason is not None:
                failed.setdefault(reason, []).append(str(patch_point))
        if is_logging_rank():
            for reason, names in failed.items():
                verb = "is left as it is" if len(names) == 1 else "are left as they are"
                own_logger().warning("%s %s: %s", ", ".join(names), verb, reason)

    def _patch_one(self, patch_point: PatchPoint, module: ModuleType) -> str | None:
        """Wrap one patch point.

        Returns:
            The reason why it is not wrapped; None if it is, or if this reason was logged before.
        """
        try:
            original = _checked_target(patch_point, module)
            if not self._is_ours(patch_point, original):
                wrappers, _, wrap = patch_point.wrapper.partition(":")
                replacement = getattr(import_module(wrappers), wrap)(original)
                if not callable(replacement):
                    raise PatchPointMismatchError(
                        f"{patch_point.wrapper} returned {replacement!r}, which is not callable"
                    )
                self._commit(patch_point, module, _Patch(patch_point, original, replacement))
        except Exception as error:  # noqa: BLE001 - a failing hook must not break the framework's import
            return self._refuse(patch_point, error)
        return None

    def _commit(self, patch_point: PatchPoint, module: ModuleType, patch: _Patch) -> None:
        with self._lock:
            # Another thread may have uninstalled or patched in the meantime.
            if self._installed and _function(patch_point, module) is patch.original:
                patch.apply(module)
                self._patches.setdefault(patch_point, []).append((module, patch))
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
            return any(patch.dispatch is function for _, patch in self._patches.get(patch_point, ()))

    def _status(self, patch_point: PatchPoint) -> PatchPointStatus:
        version = _version(patch_point)
        if patch_point in self._reasons:
            return PatchPointStatus(str(patch_point), "not patched", version, self._reasons[patch_point])
        if patch_point in self._patches:
            return PatchPointStatus(str(patch_point), "patched", version, self._on_top(patch_point))
        if not self._installed:
            return PatchPointStatus(str(patch_point), "not patched", version, "the hooks are not installed")
        if patch_point.module in sys.modules:
            return PatchPointStatus(
                str(patch_point),
                "not patched",
                version,
                "it was imported before the hooks were installed, or is being imported",
            )
        return PatchPointStatus(str(patch_point), "waiting for import", version)

    def _on_top(self, patch_point: PatchPoint) -> str | None:
        """Return the name of another package's wrapper on top of ours; None if there is none."""
        module, patch = self._patches[patch_point][-1]
        current = _function(patch_point, module)
        if current is patch.dispatch:
            return None
        place = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', repr(current))}"
        return f"wrapped by another package: {place}"


def _function(patch_point: PatchPoint, module: ModuleType) -> Any:
    """Return the function at a patch point; None if there is none, or if a class only inherits it."""
    owner, _, name = patch_point.attribute.rpartition(".")
    return vars(getattr(module, owner, object)).get(name) if owner else getattr(module, name, None)


def _checked_target(patch_point: PatchPoint, module: ModuleType) -> Function:
    """Return the function to wrap, or raise PatchPointMismatchError if it is not as expected."""
    target = _function(patch_point, module)
    if not callable(target):
        raise PatchPointMismatchError(f"{patch_point.module} has no function {patch_point.attribute}")
    try:
        names = iter(inspect.signature(target).parameters)
    except ValueError as error:
        raise PatchPointMismatchError(f"its parameters cannot be read: {error}") from error
    # `in` consumes the iterator up to the name that it finds, so this also checks the order.
    if not all(name in names for name in patch_point.parameters):
        found = ", ".join(inspect.signature(target).parameters)
        raise PatchPointMismatchError(f"expected the parameters ({', '.join(patch_point.parameters)}), found ({found})")
    function: Function = target
    return function


def _version(patch_point: PatchPoint) -> str | None:
    module = sys.modules.get(patch_point.version_module or "")
    version = getattr(module, "__version__", None)
    return None if version is None else str(version)


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
