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
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, NamedTuple

from mcore_ckpt_ext.patching.import_hook import PostImportFinder
from mcore_ckpt_ext.patching.log import is_logging_rank, own_logger

Function = Callable[..., Any]
State = Literal["waiting for import", "patched", "not patched", "not needed"]


class PatchPoint(NamedTuple):
    """One function of a framework that this package wraps.

    It is a named tuple, since every ``import torch`` pays for this class, and a dataclass takes ten times as long to
    make.

    Args:
        locations: where releases define it, the newest first, as "module:function" or "module:Class.method". In each
            module the first that is there is wrapped; a module without any is no problem while another has one.
        wrapper: "module:function" of the factory that takes the original and returns its replacement;
            imported only after the framework's module.
        parameters: names that the original must accept, in this order; there may be others in between.
        version_module: the module whose ``__version__`` is the framework's version.
        raises: types of errors that the original raises, as "module:class". If the wrapper raises an error of this
            package, that error becomes an instance of them (see `replaced_errors`).
        reads: the names that the wrapper reads from the globals of the original. Without one of them it is not wrapped,
            unless the framework's release is older than the name (`FIRST_WITH_NAME`, job/release_names.py).
    """

    locations: tuple[str, ...]
    wrapper: str
    parameters: tuple[str, ...] = ()
    version_module: str | None = None
    raises: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.locations[0].replace(":", ".")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of all locations, each once."""
        return tuple(dict.fromkeys(location.partition(":")[0] for location in self.locations))

    def attributes(self, module: str) -> list[str]:
        """Return the names that the function may have in a module, the newest first."""
        places = (location.partition(":") for location in self.locations)
        return [attribute for name, _, attribute in places if name == module]


class PatchPointStatus(NamedTuple):
    """The state of one patch point.

    Attributes:
        patch_point: the function, with its module; of several locations the newest.
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


class _Place(NamedTuple):
    """A module and the name of a function in it, ``Class.method`` for a method."""

    module: ModuleType
    attribute: str

    def function(self) -> Any:
        """Return the function; None if there is none, or if a class only inherits it."""
        owner, _, name = self.attribute.rpartition(".")
        return vars(getattr(self.module, owner, object)).get(name) if owner else getattr(self.module, name, None)


class _Patch:
    """One wrapped function: the original, the replacement, and a switch.

    ``dispatch`` stays harmless forever: once switched off it calls the original, so another package's wrapper on top of
    it, or a reference that cannot be found, still works after `uninstall`.
    """

    def __init__(self, place: _Place, original: Function, replacement: Function, raises: tuple[str, ...]) -> None:
        self.place, self.original = place, original
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
        self._finder = PostImportFinder(modules, self._after_import)
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

    def _after_import(self, name: str, module: ModuleType) -> None:
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
            place = _place_in(patch_point, name, module)
            if place is None:
                return self._pass_over(patch_point, name)
            original = _checked_function(patch_point, place)
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
        if any(
            module is not None and _place_in(patch_point, other, module) for other, module in _imported(patch_point)
        ):
            return
        attributes = patch_point.attributes(name)
        if any(_may_be_imported(other) for other in patch_point.modules):
            return
        version = _version(patch_point)
        if not all(_is_older_than(version, attribute) for attribute in attributes):
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
        version = _version(patch_point)
        if patch_point in self._reasons:
            return PatchPointStatus(str(patch_point), "not patched", version, self._reasons[patch_point])
        if patch_point in self._patches:
            return PatchPointStatus(str(patch_point), "patched", version, self._on_top(patch_point))
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

    def _on_top(self, patch_point: PatchPoint) -> str | None:
        """Return the name of another package's wrapper on top of ours; None if there is none."""
        patch = self._patches[patch_point][-1]
        current = patch.place.function()
        if current is patch.dispatch:
            return None
        place = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', repr(current))}"
        return f"wrapped by another package: {place}"


def _place_in(patch_point: PatchPoint, name: str, module: ModuleType) -> _Place | None:
    """Return the place of the function in a module; None if the module has it under none of its names."""
    places = (_Place(module, attribute) for attribute in patch_point.attributes(name))
    return next((place for place in places if callable(place.function())), None)


def _imported(patch_point: PatchPoint) -> list[tuple[str, ModuleType | None]]:
    return [(name, sys.modules.get(name)) for name in patch_point.modules]


def _may_be_imported(name: str) -> bool:
    """Return True if a module is not imported, and exists as far as can be told without importing anything."""
    parts = name.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    missing = next((parent for parent in names if parent not in sys.modules), None)
    return missing is not None and find_spec(missing) is not None


def _is_older_than(version: str | None, name: str) -> bool:
    """Return True if a release of Megatron precedes the first with a name that the wrappers know."""
    from mcore_ckpt_ext.job.release_names import precedes_name  # imported late: `import torch` pays for this module

    return precedes_name(version, name)


def _checked_function(patch_point: PatchPoint, place: _Place) -> Function:
    """Return the function to wrap, or raise PatchPointMismatchError if it is not as expected."""
    target = place.function()
    try:
        names = iter(inspect.signature(target).parameters)
    except ValueError as error:
        raise PatchPointMismatchError(f"its parameters cannot be read: {error}") from error
    # `in` consumes the iterator up to the name that it finds, so this also checks the order.
    if not all(name in names for name in patch_point.parameters):
        found = ", ".join(inspect.signature(target).parameters)
        raise PatchPointMismatchError(f"expected the parameters ({', '.join(patch_point.parameters)}), found ({found})")
    scope = getattr(inspect.unwrap(target), "__globals__", {})
    version = _version(patch_point)
    missing = [name for name in patch_point.reads if name not in scope and not _is_older_than(version, name)]
    if missing:
        module = scope.get("__name__", place.module.__name__)
        raise PatchPointMismatchError(f"{module} has no {', '.join(missing)}, which the wrapper needs")
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
